"""The whole page: its head, its parts, and what it is allowed to load, which is nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

import dpaudit
from dpaudit._markup import Html, element, joined
from dpaudit.report._run import Run
from dpaudit.report.page._compare import comparison
from dpaudit.report.page._section import run_section

__all__ = ["page"]


def page(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """One self-contained page; ``notice`` is a sentence that comes before everything else."""
    style, script = _asset("style.css"), _asset("script.js")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"dpaudit {dpaudit.__version__}"),
        element("title", title),
        element("style", style),
    )
    body = element("body", _top(title, notice), _main(runs), _bottom(), _tip(), element("script", script))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _asset(name: str) -> Html:
    # ours, and the same for every page: not text to be escaped
    return Html((resources.files("dpaudit.report.page") / name).read_text(encoding="utf-8"))


def _policy(style: str, script: str) -> str:
    """Only this style and this script: nothing that a file slipped into the page would run or be fetched."""
    hashes = [f"'sha256-{_digest(text)}'" for text in (style, script)]
    return (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; base-uri 'none'; "
        "form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _top(title: str, notice: str | None) -> Html:
    said = None if notice is None else element("p", notice, class_="lead")
    theme = element("button", "Dark", id="theme", type="button", aria_pressed="false", hidden=True)
    bar = element("div", element("p", "dpaudit report", class_="brand"), theme, class_="bar")
    return element("header", bar, element("h1", title), said)


def _main(runs: Sequence[Run]) -> Html:
    compared = comparison(runs) if len(runs) > 1 else None
    sections = [run_section(run, number, alone=len(runs) == 1) for number, run in enumerate(runs)]
    return element("main", compared, joined(sections))


def _bottom() -> Html:
    return element(
        "footer",
        element(
            "p",
            f"Made by dpaudit {dpaudit.__version__}. A lower bound says how much was seen to leak, not how "
            "much there is to see: no audit can show that a claim holds.",
        ),
    )


def _tip() -> Html:
    return element("div", id="tip", role="status", aria_live="polite", hidden=True)

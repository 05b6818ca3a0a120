"""A report as one HTML page that needs nothing else.

A content security policy forbids it to load anything. Its sections: all runs beside each other, then each run
with its verdict, the grounds for it, its plots and its settings.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources

import dpaudit
from dpaudit._html import Html, element, joined
from dpaudit.diagnostics import Diagnosis
from dpaudit.report._plots import TradeoffPlot, comparison_plot, methods_plot, scores_plot, trajectory_plot
from dpaudit.report._run import (
    COMPARISON_HEADER,
    Run,
    comparison_row,
    diagnosis_sentences,
    headline,
    smallest_leak,
    summary,
    verdict_mark,
)
from dpaudit.report._svg import number, table
from dpaudit.stats import Verdict


def page(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """Return one self-contained page; ``notice`` is a sentence that comes before everything else."""
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
    tip = element("div", id="tip", role="status", aria_live="polite", hidden=True)
    body = element("body", _header(title, notice), _main(runs), _footer(), tip, element("script", script))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _asset(name: str) -> Html:
    # ours, and the same for every page: not text to be escaped
    return Html((resources.files("dpaudit.report") / "assets" / name).read_text(encoding="utf-8"))


def _policy(style: str, script: str) -> str:
    """Allow only this style and this script: markup injected by a file would neither run nor be fetched."""
    digests = [hashlib.sha256(text.encode()).digest() for text in (style, script)]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; base-uri 'none'; "
        "form-action 'none'"
    )


def _header(title: str, notice: str | None) -> Html:
    lead = None if notice is None else element("p", notice, class_="lead")
    theme = element("button", "Dark", id="theme", type="button", aria_pressed="false", hidden=True)
    bar = element("div", element("p", "dpaudit report", class_="brand"), theme, class_="bar")
    return element("header", bar, element("h1", title), lead)


def _main(runs: Sequence[Run]) -> Html:
    compared = _comparison(runs) if len(runs) > 1 else None
    sections = [_run_section(run, index, alone=len(runs) == 1) for index, run in enumerate(runs)]
    return element("main", compared, joined(sections))


def _footer() -> Html:
    text = (
        f"Made by dpaudit {dpaudit.__version__}. A lower bound says how much was seen to leak, not how much "
        "there is to see: no audit can show that a claim holds."
    )
    return element("footer", element("p", text))


def _comparison(runs: Sequence[Run]) -> Html:
    """Return a table of all runs, and their bounds over each other."""
    links = [element("li", element("a", run.name, href=f"#run-{i}")) for i, run in enumerate(runs)]
    plot = comparison_plot(runs)
    return element(
        "section",
        element("h2", "All runs", id="all"),
        element("nav", element("ul", *links), aria_label="Runs"),
        table(COMPARISON_HEADER, [_row(run) for run in runs], words=2, label="All runs, as a table"),
        None if plot is None else element("div", plot, class_="figures"),
        aria_labelledby="all",
    )


def _row(run: Run) -> list[str]:
    name, _, *numbers = comparison_row(run)
    mark, word = verdict_mark(run.verdict)
    text = f"{mark} {word}"
    verdict = element("span", text, class_="violation") if run.verdict is Verdict.VIOLATION else text
    return [name, verdict, *numbers]


def _run_section(run: Run, index: int, *, alone: bool) -> Html:
    """Return verdict, grounds, plots, diagnostics and settings of a run; a single run needs no heading."""
    name = f"run-{index}"
    heading = None if alone else element("h2", run.name, id=name)
    return element(
        "section",
        heading,
        _verdict_section(run),
        _numbers(run),
        _grounds(run),
        _plots(run),
        None if run.diagnosis is None else _diagnosis(run.diagnosis, run.likely_causes),
        _settings(run),
        class_="run",
        aria_labelledby=None if alone else name,
        aria_label=run.name if alone else None,
    )


def _verdict_section(run: Run) -> Html:
    mark, word = verdict_mark(run.verdict)
    label = element("p", element("span", mark, aria_hidden="true"), f" {word}", class_="word")
    kind = word.lower().replace(" ", "-")
    return element(
        "div",
        label,
        element("p", headline(run), class_="headline"),
        element("p", run.sentence),
        class_=f"verdict {kind}",
    )


def _numbers(run: Run) -> Html:
    entries = [
        ("claimed", f"epsilon {number(run.claim.epsilon)}", f"at delta = {run.claim.delta:g}"),
        ("at least", f"epsilon {number(run.bound.epsilon)}", f"{run.bound.kind} bound"),
        ("confidence", f"{100 * run.bound.confidence:g} %", "of the bound and of the verdict"),
    ]
    if run.power is not None:
        leak = smallest_leak(run)
        seen = leak if leak == "none" else f"epsilon {leak}"
        below = f"with {100 * run.power.probability:g} % probability"
        entries.append(("smallest leak that would show", seen, below))
    parts = [
        element("div", element("dt", label), element("dd", element("strong", value), element("small", below)))
        for label, value, below in entries
    ]
    return element("dl", *parts, class_="numbers")


def _grounds(run: Run) -> Html:
    """Return what the verdict rests on, in full sentences."""
    entries: list[tuple[str, Html]] = [(label, element("p", text)) for label, text in summary(run)]
    lists = (
        ("assumes", run.bound.assumptions),
        ("not covered", run.not_covered),
        ("notes", run.notes),
    )
    entries += [(label, _list(texts)) for label, texts in lists if texts]
    parts = [part for label, text in entries for part in (element("dt", label), element("dd", text))]
    return element("dl", *parts, class_="grounds")


def _list(texts: Sequence[str]) -> Html:
    return element("ul", *(element("li", text) for text in texts))


def _plots(run: Run) -> Html:
    """Draw two plots a row; an odd last one has its text beside it."""
    functions = list(_plot_functions(run))
    odd = len(functions) if len(functions) % 2 else None
    drawn = [draw(wide=count == odd) for count, draw in enumerate(functions, start=1)]
    return element("div", *drawn, methods_plot(run) if run.methods else None, class_="figures")


def _plot_functions(run: Run) -> Iterator[Callable[..., Html]]:
    """Yield a function for each plot that this run has the numbers for."""
    figures = run.figures
    if figures.scores is not None:
        yield partial(scores_plot, figures.scores)
    if figures.course is not None:
        yield partial(trajectory_plot, run, figures.course)
    if figures.plane is not None:
        plot = TradeoffPlot(figures.plane)
        yield plot.full
        if plot.needs_closeup:
            yield plot.closeup


def _diagnosis(found: Diagnosis, causes: Sequence[str]) -> Html:
    flagged = {one.name for one in found.findings}
    rows = [(one.name, f"{one.p_value:.2g}", "found" if one.name in flagged else "") for one in found.checks]
    parts = [element("h3", "Diagnostics"), element("p", " ".join(diagnosis_sentences(found)))]
    if found.findings:
        parts.append(_list([f"{one.name}: {one.sentence}" for one in found.findings]))
    if causes:
        parts += [element("p", "What may be the cause:"), _list(causes)]
    parts += [element("p", f"Note: {note}") for note in found.notes]
    tests = table(("test", "p-value", ""), rows, label="All tests")
    parts.append(element("details", element("summary", "Numbers: all tests"), tests))
    return element("div", *parts, class_="part")


def _settings(run: Run) -> Html | None:
    """Return the training, its configuration, which is long and folded, and the versions."""
    parts: list[Html] = []
    if run.facts:
        parts += [element("h3", "The training"), _lines(run.facts)]
    if run.settings:
        folded = element("summary", element("h3", "Configuration"))
        parts.append(element("details", folded, _lines(run.settings)))
    if run.versions:
        parts += [element("h3", "Versions"), _lines(run.versions)]
    return element("div", joined(parts), class_="part") if parts else None


def _lines(lines: Mapping[str, str]) -> Html:
    pairs = [element("div", element("dt", label), element("dd", text)) for label, text in lines.items()]
    return element("dl", *pairs, class_="settings")

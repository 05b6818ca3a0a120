"""A report as one HTML page that needs nothing else.

The page, what it is allowed to load, which is nothing, and its sections: all runs beside each other, then
each run with its verdict, the grounds for it, its plots and its settings.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources

import dpaudit
from dpaudit._html import Html, element, joined
from dpaudit.diagnostics import Diagnosis
from dpaudit.report._plots import ComparisonPlot, MethodsPlot, ScoresPlot, TrajectoryPlot
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
from dpaudit.report._tradeoff_plot import TradeoffPlot
from dpaudit.stats import Verdict


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
    return Html((resources.files("dpaudit.report") / "assets" / name).read_text(encoding="utf-8"))


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
    compared = _comparison(runs) if len(runs) > 1 else None
    sections = [_run_section(run, number, alone=len(runs) == 1) for number, run in enumerate(runs)]
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


def _comparison(runs: Sequence[Run]) -> Html:
    """A table of all runs, and their bounds over each other."""
    links = [element("li", element("a", run.name, href=f"#run-{i}")) for i, run in enumerate(runs)]
    plot = ComparisonPlot.of(runs)
    return element(
        "section",
        element("h2", "All runs", id="all"),
        element("nav", element("ul", *links), aria_label="Runs"),
        table(COMPARISON_HEADER, [_row(run) for run in runs], words=2, label="All runs, as a table"),
        None if plot is None else element("div", plot.html(), class_="figures"),
        aria_labelledby="all",
    )


def _row(run: Run) -> list[str]:
    name, _, *numbers = comparison_row(run)
    mark, word = verdict_mark(run.verdict)
    text = f"{mark} {word}"
    verdict = element("span", text, class_="violation") if run.verdict is Verdict.VIOLATION else text
    return [name, verdict, *numbers]


def _run_section(run: Run, place: int, *, alone: bool) -> Html:
    """Verdict, what it rests on, pictures, diagnostics, settings. The only run needs no heading."""
    name = f"run-{place}"
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
    return element("dl", *(_big(*entry) for entry in entries), class_="numbers")


def _big(label: str, value: str, below: str) -> Html:
    shown = element("dd", element("strong", value), element("small", below))
    return element("div", element("dt", label), shown)


def _grounds(run: Run) -> Html:
    """What the verdict rests on, in full sentences."""
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
    """Two a row; one that is left alone has its words beside it."""
    draw = list(_drawable(run))
    found = [one(wide=len(draw) % 2 == 1 and place == len(draw) - 1) for place, one in enumerate(draw)]
    if run.methods:
        found.append(MethodsPlot(run).html())
    return element("div", *found, class_="figures")


def _drawable(run: Run) -> Iterator[Callable[..., Html]]:
    """What draws the plots that this run has the numbers for."""
    figures = run.figures
    if figures.scores is not None:
        yield ScoresPlot(figures.scores).html
    if figures.course is not None:
        yield TrajectoryPlot(run, figures.course).html
    if figures.plane is not None:
        plot = TradeoffPlot(figures.plane)
        yield plot.whole
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
    """The configuration is long, and folded."""
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

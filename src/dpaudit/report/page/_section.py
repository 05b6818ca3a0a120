"""One run on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from dpaudit._markup import Html, element, joined
from dpaudit.report._diagnosis import DiagnosisValues
from dpaudit.report._run import Run
from dpaudit.report._words import headline, smallest_leak, summary, verdict_mark
from dpaudit.report.plots import (
    close_figure,
    course_figure,
    methods_figure,
    needs_close_figure,
    number,
    plane_figure,
    scores_figure,
    table,
)

__all__ = ["run_section"]


def run_section(run: Run, place: int, *, alone: bool) -> Html:
    """Verdict, what it rests on, pictures, diagnostics, settings. The only run needs no heading."""
    name = f"run-{place}"
    heading = None if alone else element("h2", run.name, id=name)
    return element(
        "section",
        heading,
        _verdict(run),
        _numbers(run),
        _grounds(run),
        _pictures(run),
        None if run.diagnosis is None else _diagnosis(run.diagnosis),
        _settings(run),
        class_="run",
        aria_labelledby=None if alone else name,
        aria_label=run.name if alone else None,
    )


def _verdict(run: Run) -> Html:
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


def _pictures(run: Run) -> Html:
    """Two a row; one that is left alone has its words beside it."""
    made = list(_makers(run))
    found = [make(wide=len(made) % 2 == 1 and place == len(made) - 1) for place, make in enumerate(made)]
    if run.methods:
        found.append(methods_figure(run.bound, run.methods, run.claim))
    return element("div", *found, class_="figures")


def _makers(run: Run) -> Iterator[Callable[..., Html]]:
    """What can be drawn of this run."""
    figures = run.figures
    if figures.scores is not None:
        yield partial(scores_figure, figures.scores)
    if figures.course is not None:
        yield partial(course_figure, run, figures.course)
    if figures.plane is not None:
        yield partial(plane_figure, figures.plane)
        if needs_close_figure(figures.plane):
            yield partial(close_figure, figures.plane)


def _diagnosis(found: DiagnosisValues) -> Html:
    flagged = {one.name for one in found.findings}
    rows = [(name, f"{p_value:.2g}", "found" if name in flagged else "") for name, p_value in found.tests]
    parts = [element("h3", "Diagnostics"), element("p", f"{found.sentence} {found.meaning}")]
    if found.findings:
        parts.append(_list([f"{one.name}: {one.sentence}" for one in found.findings]))
    if found.causes:
        parts += [element("p", "What may be the cause:"), _list(found.causes)]
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

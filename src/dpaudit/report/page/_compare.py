"""Several runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from dpaudit._markup import Html, element
from dpaudit.report._run import Run
from dpaudit.report._words import smallest_leak, verdict_mark
from dpaudit.report.plots import compared_figure, number, table
from dpaudit.stats import Verdict

__all__ = ["comparison"]


def comparison(runs: Sequence[Run]) -> Html:
    """A table of all runs, and their bounds over each other."""
    links = [element("li", element("a", run.name, href=f"#run-{i}")) for i, run in enumerate(runs)]
    picture = compared_figure(runs)
    return element(
        "section",
        element("h2", "All runs", id="all"),
        element("nav", element("ul", *links), aria_label="Runs"),
        table(_HEADER, [_row(run) for run in runs], words=2, label="All runs, as a table"),
        None if picture is None else element("div", picture, class_="figures"),
        aria_labelledby="all",
    )


_HEADER = (
    "run",
    "verdict",
    "claimed epsilon",
    "epsilon at least",
    "confidence",
    "smallest leak that would show",
)


def _row(run: Run) -> list[str]:
    return [
        run.name,
        _verdict(run),
        number(run.claim.epsilon),
        number(run.bound.epsilon),
        f"{100 * run.bound.confidence:g} %",
        smallest_leak(run),
    ]


def _verdict(run: Run) -> str:
    mark, word = verdict_mark(run.verdict)
    text = f"{mark} {word}"
    return element("span", text, class_="violation") if run.verdict is Verdict.VIOLATION else text

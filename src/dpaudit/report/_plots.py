"""The plots of a report as SVG, each with its numbers as a table; no library and no network is needed.

- :class:`ScoresPlot`: the scores with and without the canary.
- :class:`TrajectoryPlot`: the bound after more and more observations.
- :class:`ComparisonPlot`: that of several runs over each other.
- :class:`MethodsPlot`: the bounds of all methods beside each other, with the claim.

The trade-off plot has a module of its own, ``_tradeoff_plot``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpaudit._html import Html, element, joined
from dpaudit.recording import Course, Moment
from dpaudit.report._figures import Histogram
from dpaudit.report._run import MethodBound, Run
from dpaudit.report._svg import WIDTH, AxisScale, Canvas, figure, key, number, table


@dataclass(frozen=True)
class ScoresPlot:
    """The two distributions of scores, one filled, and the threshold."""

    scores: Histogram

    def html(self, *, wide: bool = False) -> Html:
        """Draw the plot, with its text and its numbers."""
        found = self.scores
        shares = found.share(found.with_canary), found.share(found.without_canary)
        highest = max(float(share.max()) for share in shares)
        canvas = Canvas.of((float(found.edges[0]), float(found.edges[-1])), (0.0, 100 * highest * 1.08))
        xs = np.repeat(found.edges, 2)[1:-1]
        present, absent = (np.repeat(100 * share, 2) for share in shares)
        marks = [
            canvas.axes("score", "share of the scores, %"),
            canvas.area(list(xs), [0.0] * xs.size, list(present), "area with"),
            canvas.line(xs, present, "line with"),
            canvas.line(xs, absent, "line without"),
        ]
        entries = [("area with", "with the canary"), ("line without", "without it")]
        if found.threshold is not None:
            entries.append(("line threshold", f"threshold {number(found.threshold)}"))
            if found.edges[0] <= found.threshold <= found.edges[-1]:
                marks.append(canvas.vertical(found.threshold, "line threshold"))
        middles = list((found.edges[1:] + found.edges[:-1]) / 2)
        picture = canvas.svg(*marks, canvas.strips(middles, self._tips()), label="Scores in bins")
        return figure("Scores", self._text(), picture, self._table(), keys=key(*entries), wide=wide)

    def _text(self) -> str:
        sizes = [int(side.sum()) for side in (self.scores.with_canary, self.scores.without_canary)]
        return (
            f"{sizes[0]:,} scores with the canary and {sizes[1]:,} without it. The further they lie apart, "
            "the better an attacker tells the two; what overlaps cannot be told."
        )

    def _bins(self) -> list[str]:
        return [f"{number(low)} to {number(high)}" for low, high in pairwise(self.scores.edges)]

    def _tips(self) -> list[str]:
        sides = self.scores.with_canary, self.scores.without_canary
        shares = [100 * self.scores.share(side) for side in sides]
        return [
            f"score {between}\nwith the canary: {sides[0][i]:,} ({shares[0][i]:.2g} %)\n"
            f"without it: {sides[1][i]:,} ({shares[1][i]:.2g} %)"
            for i, between in enumerate(self._bins())
        ]

    def _table(self) -> Html:
        sides = self.scores.with_canary, self.scores.without_canary
        rows = [
            (between, *(f"{count:,}" for count in counts))
            for between, *counts in zip(self._bins(), *sides, strict=True)
        ]
        return table(("score", "with", "without"), rows, label="Scores in bins, as a table")


@dataclass(frozen=True)
class TrajectoryPlot:
    """The live bound with its band, the estimate, and the claim."""

    run: Run
    course: Course

    def html(self, *, wide: bool = False) -> Html:
        """Draw the plot, with its text and its numbers."""
        run, moments = self.run, self.course.moments
        steps = [float(one.num_done) for one in moments]
        lower, upper = [one.epsilon for one in moments], [one.upper for one in moments]
        canvas = _bounds_canvas([self.course], run.claim.epsilon, (steps[0], steps[-1]))
        picture = canvas.svg(
            canvas.axes(f"{run.counted}s", "epsilon"),
            canvas.inside(
                canvas.area(steps, lower, upper, "area band"),
                canvas.line(steps, [one.estimate for one in moments], "line estimate"),
                canvas.line(steps, lower, "line bound"),
            ),
            canvas.horizontal(run.claim.epsilon, "line claim"),
            canvas.strips(steps, [self._tip(one) for one in moments]),
            label="Lower bound on epsilon over time",
        )
        keys = key(
            ("line bound", "lower bound"),
            ("area band", "band"),
            ("line estimate", "estimate"),
            ("line claim", f"claim {number(run.claim.epsilon)}"),
        )
        return figure("Bound over time", self._text(), picture, self._table(), keys=keys, wide=wide)

    def _text(self) -> str:
        level = f"{100 * self.course.confidence:g} %"
        text = (
            f"Bets on the errors give a lower bound that holds at every {self.run.counted} at once, with "
            f"{level} confidence: a run may be stopped because of it. The band ends where the leak that this "
            f"attack shows would end, also with {level}, if its error rate does not change; a better attack "
            "may show more."
        )
        if self.run.figures.of_verdict:
            return text
        return (
            f"{text} The verdict rests on another method, with a bound of {number(self.run.bound.epsilon)}."
        )

    def _tip(self, one: Moment) -> str:
        return (
            f"{self.run.counted} {one.num_done:,}\nepsilon >= {number(one.epsilon)}\n"
            f"estimate {number(one.estimate)}, band to {number(one.upper)}\n"
            f"claim {number(self.run.claim.epsilon)}"
        )

    def _table(self) -> Html:
        header = (f"{self.run.counted}s", "lower bound", "estimate", "end of the band")
        rows = [
            (f"{one.num_done:,}", number(one.epsilon), number(one.estimate), number(one.upper))
            for one in self.course.moments
        ]
        return table(header, rows, words=0, label="The bound over time, as a table")


_DASHES = ("one", "two", "three", "four")  # classes of lines, by which runs are told apart
_COMPARED = (
    "The lower bound on epsilon of each run while it went on, by bets on its errors. A bound above its claim "
    "refutes the claim."
)


@dataclass(frozen=True)
class ComparisonPlot:
    """The live bounds of several runs over each other; ``drawn`` are the first runs that have one."""

    drawn: Sequence[tuple[Run, Course]]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> ComparisonPlot | None:
        """The plot; None if no two runs have a live bound."""
        drawn = [(run, run.figures.course) for run in runs if run.figures.course is not None]
        return cls(drawn[: len(_DASHES)]) if len(drawn) > 1 else None

    def html(self) -> Html:
        """Draw the plot, with its text and its numbers."""
        claims = sorted({run.claim.epsilon for run, _ in self.drawn})
        canvas = _bounds_canvas([course for _, course in self.drawn], claims[-1], (0.0, 100.0))
        longest = _percent(max((course for _, course in self.drawn), key=lambda one: len(one.moments)))
        picture = canvas.svg(
            canvas.axes("observations, in % of those made", "epsilon"),
            *(
                canvas.line(_percent(course), [one.epsilon for one in course.moments], f"line run {dash}")
                for (_, course), dash in zip(self.drawn, _DASHES, strict=False)
            ),
            *(canvas.horizontal(claim, "line claim") for claim in claims),
            canvas.strips(longest, [self._tip(percent) for percent in longest]),
            label="Lower bounds of all runs",
        )
        keys = key(
            *((f"line run {dash}", run.name) for (run, _), dash in zip(self.drawn, _DASHES, strict=False)),
            ("line claim", "claim " + ", ".join(map(number, claims))),
        )
        rows = [[f"{percent:.0f} %", *self._bounds_at(percent)] for percent in longest]
        header = ("made", *(run.name for run, _ in self.drawn))
        numbers = table(header, rows, label="Lower bounds, as a table")
        return figure("Bounds over time", _COMPARED, picture, numbers, keys=keys, wide=True)

    def _bounds_at(self, percent: float) -> list[str]:
        found = []
        for _, course in self.drawn:
            moments = zip(course.moments, _percent(course), strict=True)
            found.append(number(next(one.epsilon for one, at in moments if at >= percent - 1e-9)))
        return found

    def _tip(self, percent: float) -> str:
        bounds = zip(self.drawn, self._bounds_at(percent), strict=True)
        return "\n".join(
            [f"{percent:.0f} % made", *(f"{run.name}: epsilon >= {bound}" for (run, _), bound in bounds)]
        )


def _bounds_canvas(courses: Sequence[Course], claim: float, across: tuple[float, float]) -> Canvas:
    """Room for bounds and claims; bands may leave it."""
    heights = [one.epsilon for course in courses for one in course.moments]
    heights += [*(course.moments[-1].estimate for course in courses), claim]
    top = max((height for height in heights if math.isfinite(height)), default=1.0) or 1.0
    return Canvas.of(across, (0.0, 1.25 * top), counts=True)


def _percent(course: Course) -> list[float]:
    last = course.moments[-1].num_done
    return [100 * one.num_done / last for one in course.moments]


_ROW = 24  # the height of a bar with its room
_TOP, _AXIS = 4, 46  # room above the bars and below them
_NAMES, _NUMBERS = 168, 52  # room for text on the left and on the right
_METHODS = (
    "Lower bounds on epsilon from the same scores. A confidence bound exceeds the truth at most as often as "
    "it says, each for itself; a credible one depends on a prior, and of a heuristic one no error rate is "
    "known. The verdict rests on the first bar alone."
)


@dataclass(frozen=True)
class MethodsPlot:
    """A bar a method: what lies under it is refuted. The verdict's own bound comes first."""

    run: Run

    def html(self) -> Html:
        """Draw the plot, with its text and its numbers."""
        claimed, rows = self.run.claim.epsilon, [self.run.verdict_bound, *self.run.methods]
        bars = [(row, row.claim_epsilon) for row in rows if row.claim_epsilon is not None]
        ends = [end for end in (*(end for _, end in bars), claimed) if math.isfinite(end)]
        height = _TOP + _ROW * len(bars) + _AXIS
        canvas = Canvas(
            AxisScale(0.0, 1.05 * max([*ends, 1e-9]), _NAMES, WIDTH - _NUMBERS),
            AxisScale(0.0, 1.0, height - _AXIS, _TOP),
            height,
        )
        picture = canvas.svg(
            canvas.x_axis("epsilon", 4),
            joined(_bar(canvas, row, end, place) for place, (row, end) in enumerate(bars)),
            canvas.vertical(claimed, "line claim"),
            joined(_bar_tip(row, end, place) for place, (row, end) in enumerate(bars)),
            label="Lower bounds of all methods",
        )
        keys = key(
            ("area confidence", "confidence"),
            ("area credible", "credible"),
            ("area heuristic", "heuristic"),
            ("line claim", f"claim {number(claimed)}"),
        )
        header = ("method", "threshold", "kind", "epsilon", "for the claim")
        cells = [
            (row.name, _rule(row), str(row.bound.kind), number(row.epsilon), number(row.claim_epsilon))
            for row in rows
        ]
        numbers = table(header, cells, words=3, label="Bounds of all methods, as a table")
        return figure("All methods", _METHODS, picture, numbers, keys=keys, wide=True)


def _bar(canvas: Canvas, row: MethodBound, end: float, place: int) -> Html:
    top, kind = _TOP + place * _ROW, row.bound.kind
    width = max(canvas.x(end) - canvas.x.start, 1)
    name = f"{row.name}, {_rule(row)}" if place else "verdict"
    text = "tick end" if place else "tick end strong"
    return joined(
        [
            element("text", name, class_=text, x=_NAMES - 8, y=top + 16),
            element("rect", class_=f"area {kind}", x=_NAMES, y=top + 6, width=width, height=12),
            element("text", number(end), class_=text, x=WIDTH - 2, y=top + 16),
        ]
    )


def _bar_tip(row: MethodBound, end: float, place: int) -> Html:
    # a kind is part of the statement
    tip = f"{row.name}\n{row.bound.statement}\nfor the claim: epsilon >= {number(end)}\n{row.bound.label}"
    top = _TOP + place * _ROW
    return element("rect", class_="hit", x=0, y=top, width=WIDTH, height=_ROW, data_tip=tip)


def _rule(row: MethodBound) -> str:
    """The threshold rule in the few letters that there is room for."""
    return row.bound.threshold_rule.label.replace("fixed ", "at ")[:14]

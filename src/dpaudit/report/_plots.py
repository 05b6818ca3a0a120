"""The plots of a report as SVG, each with a table of its numbers; they need no library and no network.

- :func:`scores_plot`: the scores with and without the canary.
- :func:`trajectory_plot`: the bound over time.
- :func:`comparison_plot`: the bounds of several runs over time.
- :class:`TradeoffPlot`: the error rates that the claim allows, and those that were measured.
- :func:`roc_plot`: the true positive rates of the attack, with a band.
- :func:`methods_plot`: the bounds of all methods, with the claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpaudit import _validate
from dpaudit._html import Html, element, joined
from dpaudit._types import IntArray
from dpaudit.recording import Trajectory
from dpaudit.report._plot_data import Histogram
from dpaudit.report._run import METHODS_HEADER, MethodBound, Run, method_row
from dpaudit.report._svg import WIDTH, AxisScale, Canvas, figure, key, number, table
from dpaudit.stats import ErrorRatePlane, Kind, RocBand

_DASHES = ("one", "two", "three", "four")  # classes of lines, one per compared run
_BAR_HEIGHT = 24  # including the space around a bar
_TOP, _AXIS = 4, 46  # space above and below the bars
_NAMES, _NUMBERS = 192, 52  # space for text on the left and on the right
_PLANE_HEIGHT = 300
_RATES = "false positive rate", "false negative rate"


def scores_plot(scores: Histogram, *, wide: bool = False) -> Html:
    """Draw the two distributions of scores, one of them filled, and the threshold."""
    sides = scores.with_canary, scores.without_canary
    percent = [100 * scores.share(side) for side in sides]
    canvas = Canvas.of(
        (float(scores.edges[0]), float(scores.edges[-1])),
        (0.0, 1.08 * max(float(share.max()) for share in percent)),
    )
    xs = np.repeat(scores.edges, 2)[1:-1]
    present, absent = (np.repeat(share, 2) for share in percent)
    marks = [
        canvas.axes("score", "scores, %"),
        canvas.area(list(xs), [0.0] * xs.size, list(present), "area with"),
        canvas.line(xs, present, "line with"),
        canvas.line(xs, absent, "line without"),
    ]
    entries = [("area with", "with the canary"), ("line without", "without it")]
    if scores.threshold is not None:
        entries.append(("line threshold", f"threshold {number(scores.threshold)}"))
        if scores.edges[0] <= scores.threshold <= scores.edges[-1]:
            marks.append(canvas.vertical(scores.threshold, "line threshold"))
    bins = [f"{number(low)} to {number(high)}" for low, high in pairwise(scores.edges)]
    tips = [
        f"score {between}\nwith the canary: {sides[0][i]:,} ({percent[0][i]:.2g} %)\n"
        f"without it: {sides[1][i]:,} ({percent[1][i]:.2g} %)"
        for i, between in enumerate(bins)
    ]
    middles = list((scores.edges[1:] + scores.edges[:-1]) / 2)
    picture = canvas.svg(*marks, canvas.strips(middles, tips), label="Histogram of scores")
    text = (
        f"{sides[0].sum():,} scores with the canary and {sides[1].sum():,} without it. The further apart "
        "they are, the better an attacker can distinguish them; in the overlap, a score may come from either."
    )
    rows = [(between, f"{sides[0][i]:,}", f"{sides[1][i]:,}") for i, between in enumerate(bins)]
    numbers = table(("score", "with", "without"), rows, label="Histogram of scores, as a table")
    return figure("Scores", text, picture, numbers, keys=key(*entries), wide=wide)


def trajectory_plot(run: Run, trajectory: Trajectory, *, wide: bool = False) -> Html:
    """Draw the live bound of a run with its band, the estimate, and the claim."""
    points, claimed = trajectory.points, number(run.claim.epsilon)
    steps = [float(point.num_done) for point in points]
    lower, upper = [point.epsilon for point in points], [point.upper for point in points]
    tips = [
        f"{run.counted} {point.num_done:,}\nepsilon >= {number(point.epsilon)}\n"
        f"estimate {number(point.estimate)}, band up to {number(point.upper)}\nclaim {claimed}"
        for point in points
    ]
    canvas = _bounds_canvas([trajectory], run.claim.epsilon, (steps[0], steps[-1]))
    picture = canvas.svg(
        canvas.axes(f"{run.counted}s", "epsilon"),
        canvas.inside(
            canvas.area(steps, lower, upper, "area band"),
            canvas.line(steps, [point.estimate for point in points], "line estimate"),
            canvas.line(steps, lower, "line bound"),
        ),
        canvas.horizontal(run.claim.epsilon, "line claim"),
        canvas.strips(steps, tips),
        label="Lower bound on epsilon over time",
    )
    keys = key(
        ("line bound", "lower bound"),
        ("area band", "band"),
        ("line estimate", "estimate"),
        ("line claim", f"claim {claimed}"),
    )
    header = (f"{run.counted}s", "lower bound", "estimate", "top of the band")
    rows = [
        (f"{point.num_done:,}", number(point.epsilon), number(point.estimate), number(point.upper))
        for point in points
    ]
    numbers = table(header, rows, words=0, label="Lower bound over time, as a table")
    return figure(
        "Bound over time", _trajectory_text(run, trajectory), picture, numbers, keys=keys, wide=wide
    )


def _trajectory_text(run: Run, trajectory: Trajectory) -> str:
    level = _validate.percent(trajectory.confidence)
    text = (
        f"Betting on the errors gives a lower bound that holds at every {run.counted} simultaneously, with "
        f"{level} confidence: it may be used to stop a run early. The top of the band bounds the leak that "
        f"this attack can show, also with {level} confidence, if its error rate is constant; a better attack "
        "may show more."
    )
    if run.figures.of_verdict:
        return text
    return f"{text} The verdict rests on another method, with a bound of {number(run.bound.epsilon)}."


def comparison_plot(runs: Sequence[Run]) -> Html | None:
    """Draw the live bounds of the first runs that have one; None if there are fewer than two."""
    live = [(run, run.figures.course) for run in runs if run.figures.course is not None]
    if len(live) < 2:
        return None
    names = [run.name for run, _ in live[: len(_DASHES)]]
    trajectories = [trajectory for _, trajectory in live[: len(_DASHES)]]
    claims = sorted({run.claim.epsilon for run, _ in live[: len(_DASHES)]})
    percents = _percents(max(trajectories, key=lambda trajectory: len(trajectory.points)))
    bounds = [[_bound_at(trajectory, percent) for trajectory in trajectories] for percent in percents]
    tips = [
        "\n".join([f"{percent:.0f} % of observations", *map("{}: epsilon >= {}".format, names, row)])
        for percent, row in zip(percents, bounds, strict=True)
    ]
    canvas = _bounds_canvas(trajectories, claims[-1], (0.0, 100.0))
    picture = canvas.svg(
        canvas.axes("observations, %", "epsilon"),
        *(
            canvas.line(
                _percents(trajectory), [point.epsilon for point in trajectory.points], f"line run {dash}"
            )
            for trajectory, dash in zip(trajectories, _DASHES, strict=False)
        ),
        *(canvas.horizontal(claim, "line claim") for claim in claims),
        canvas.strips(percents, tips),
        label="Lower bounds of all runs",
    )
    keys = key(
        *((f"line run {dash}", name) for name, dash in zip(names, _DASHES, strict=False)),
        ("line claim", "claim " + ", ".join(map(number, claims))),
    )
    text = (
        "The lower bound on epsilon of each run over time, by betting on its errors. A bound above its claim "
        "refutes the claim."
    )
    rows = [[f"{percent:.0f} %", *row] for percent, row in zip(percents, bounds, strict=True)]
    numbers = table(("observations", *names), rows, label="Lower bounds, as a table")
    return figure("Bounds over time", text, picture, numbers, keys=keys, wide=True)


def _bound_at(trajectory: Trajectory, percent: float) -> str:
    points = zip(trajectory.points, _percents(trajectory), strict=True)
    return number(next(point.epsilon for point, reached in points if reached >= percent - 1e-9))


def _percents(trajectory: Trajectory) -> list[float]:
    """Return the points of a trajectory as percentages of all its observations."""
    last = trajectory.points[-1].num_done
    return [100 * point.num_done / last for point in trajectory.points]


def _bounds_canvas(trajectories: Sequence[Trajectory], claim: float, across: tuple[float, float]) -> Canvas:
    """Return a canvas that fits bounds and claims; bands may exceed it."""
    heights = [point.epsilon for trajectory in trajectories for point in trajectory.points]
    heights += [*(trajectory.points[-1].estimate for trajectory in trajectories), claim]
    top = max((height for height in heights if math.isfinite(height)), default=1.0) or 1.0
    return Canvas.of(across, (0.0, 1.25 * top), counts=True)


@dataclass(frozen=True)
class TradeoffPlot:
    """The claimed curve, the curve of the bound, and the measured rates with their region.

    It is drawn in full and, if that shows more, as a close-up of the measured rates.
    """

    plane: ErrorRatePlane

    def full(self, *, wide: bool = False) -> Html:
        """Draw all rates from 0 to 1."""
        canvas = Canvas.of((0.0, 1.0), (0.0, 1.0), _PLANE_HEIGHT)
        picture = canvas.svg(
            canvas.axes(*_RATES),
            canvas.line((0.0, 1.0), (1.0, 0.0), "line nothing"),
            *self._marks(canvas),
            label="Trade-off between the two error rates",
        )
        text = (
            "If the claim holds, the error rates of every attack are on or above the claimed curve: the "
            "shaded region is out of reach. On the dotted diagonal, an attacker learns nothing."
        )
        return figure("Trade-off", text, picture, self._table_of_curves(), keys=self._key(), wide=wide)

    @property
    def needs_closeup(self) -> bool:
        """Whether a close-up shows more than the full plot."""
        (low, high), _ = self._window()
        return high - low < 0.6  # a wider window shows nothing new

    def closeup(self, *, wide: bool = False) -> Html:
        """Draw the part around the measured rates."""
        canvas = Canvas.of(*self._window(), _PLANE_HEIGHT)
        picture = canvas.svg(
            canvas.axes(*_RATES),
            *self._marks(canvas),
            label="Trade-off between the two error rates, close-up of the measured rates",
        )
        level = _validate.percent(self.plane.confidence)
        text = (
            f"The box contains both true rates with {level} confidence, if all "
            "observations are independent (Clopper-Pearson, with half of the error for each rate). The curve "
            "of the bound is the leakiest curve that is refuted."
        )
        title = "Trade-off, close-up"
        return figure(title, text, picture, self._table_of_rates(), keys=self._key(), wide=wide)

    def _window(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return a square that contains the region and the nearest part of the claimed curve."""
        plane, (fpr, fnr) = self.plane, (self.plane.counts.fpr, self.plane.counts.fnr)
        sides = [high - low for low, high in plane.region]
        gap = float(np.min(np.abs(plane.claimed - fnr) + np.abs(plane.fpr - fpr)))
        reach = min(max(1.5 * max(sides), 1.4 * gap, 0.005), 0.5)
        middle = [min(max(rate, reach), 1 - reach) for rate in (fpr, fnr)]
        return (middle[0] - reach, middle[0] + reach), (middle[1] - reach, middle[1] + reach)

    def _marks(self, canvas: Canvas) -> list[Html]:
        plane, counts = self.plane, self.plane.counts
        # one point beyond either edge, so that lines reach it
        inside = (plane.fpr >= canvas.x.low) & (plane.fpr <= canvas.x.high)
        first, last = np.flatnonzero(inside)[[0, -1]]
        window = slice(max(first - 1, 0), last + 2)
        xs, claimed, bound = plane.fpr[window], plane.claimed[window], plane.bound[window]
        chosen = _evenly(xs.size)
        tips = [
            f"at a false positive rate of {number(xs[i])}\nclaimed: false negative rate >= "
            f"{number(claimed[i])}\ncurve of the bound: {number(bound[i])}"
            for i in chosen
        ]
        return [
            canvas.inside(
                canvas.area(list(xs), [canvas.y.low] * xs.size, list(claimed), "area impossible"),
                canvas.box(*plane.region, "area region"),
                canvas.line(xs, claimed, "line curve"),
                canvas.line(xs, bound, "line bound"),
                canvas.strips(list(xs[chosen]), tips),
            ),
            element("circle", class_="dot measured", cx=canvas.x(counts.fpr), cy=canvas.y(counts.fnr), r=3.5),
            canvas.target(counts.fpr, counts.fnr, self._measured_tip()),
        ]

    def _measured_tip(self) -> str:
        counts, ((low, high), (less, more)) = self.plane.counts, self.plane.region
        return (
            f"measured\nfalse positive rate {number(counts.fpr)} ({number(low)} to {number(high)})\n"
            f"false negative rate {number(counts.fnr)} ({number(less)} to {number(more)})"
        )

    @staticmethod
    def _key() -> Html:
        return key(
            ("line curve", "claimed curve"),
            ("line bound", "curve of the bound"),
            ("area region", "measured rates, with their region"),
        )

    def _table_of_curves(self) -> Html:
        columns = self.plane.fpr, self.plane.claimed, self.plane.bound
        rows = [[number(column[i]) for column in columns] for i in _evenly(self.plane.fpr.size)]
        header = ("false positive rate", "claimed curve", "curve of the bound")
        return table(header, rows, words=0, label="The curves, as a table")

    def _table_of_rates(self) -> Html:
        counts, (fpr, fnr) = self.plane.counts, self.plane.region
        measured = [
            ("false positives", counts.false_positives, counts.num_absent, counts.fpr, *fpr),
            ("false negatives", counts.false_negatives, counts.num_present, counts.fnr, *fnr),
        ]
        rows = [
            (name, f"{errors:,}", f"{size:,}", *map(number, rates)) for name, errors, size, *rates in measured
        ]
        header = ("", "errors", "of", "rate", "from", "to")
        return table(header, rows, label="The measured rates, as a table")


def roc_plot(roc: RocBand, *, wide: bool = False) -> Html:
    """Draw the true positive rates that the attack reached, their intervals, and the claimed curve."""
    fpr, seen = roc.fpr, np.concatenate([roc.claimed, roc.reached])
    least = 10 ** math.floor(math.log10(max(float(seen[seen > 0].min(initial=1.0)), 1e-6)))
    canvas = Canvas.of((float(fpr[0]), 1.0), (min(least, 0.1), 1.0), _PLANE_HEIGHT, log=True)
    corners = np.repeat(fpr, 2)[1:-1]  # a rate between two of the grid has the wider end of both
    tips = [
        f"at a false positive rate of {number(fpr[i])}\nthis attack: true positive rate "
        f"{number(roc.reached[i])} ({number(roc.low[i])} to {number(roc.high[i])})\n"
        f"claimed: at most {number(roc.claimed[i])}"
        for i in range(fpr.size)
    ]
    picture = canvas.svg(
        canvas.axes("false positive rate", "true positive rate"),
        canvas.inside(
            canvas.area(
                list(corners), list(np.repeat(roc.low[:-1], 2)), list(np.repeat(roc.high[1:], 2)), "area band"
            ),
            canvas.line(fpr, fpr, "line nothing"),
            canvas.line(fpr, roc.claimed, "line curve"),
            canvas.line(fpr, roc.reached, "line bound"),
        ),
        canvas.strips(list(fpr), tips),
        label="True positive rates of the attack",
    )
    level = _validate.percent(roc.confidence)
    text = (
        "How many of the present canaries this attack recognizes if it may be wrong about some of the absent "
        f"ones. Each interval (not all at once) contains its rate with {level} confidence, if scores, "
        "or steps that canaries share, are independent. No attack may be above the claimed curve. The upper "
        "ends are about this attack: another may recognize more. The verdict does not rest on this estimate."
    )
    columns = fpr, roc.claimed, roc.reached, roc.low, roc.high
    rows = [[number(column[i]) for column in columns] for i in range(fpr.size)]
    header = ("false positive rate", "claimed, at most", "this attack", "from", "to")
    numbers = table(header, rows, words=0, label="True positive rates, as a table")
    keys = key(
        ("line curve", "claimed curve"), ("line bound", "this attack"), ("area band", f"{level} intervals")
    )
    return figure("True positive rates", text, picture, numbers, keys=keys, wide=wide)


def _evenly(size: int) -> IntArray:
    """Return the indices of the points that have a tip, out of ``size`` points and including both ends."""
    return np.unique(np.linspace(0, size - 1, min(40, size)).round().astype(int))


def methods_plot(run: Run) -> Html:
    """Draw one bar per method: every epsilon within it is refuted. The verdict's own bound comes first."""
    claimed, methods = run.claim.epsilon, [run.verdict_bound, *run.methods]
    bars = [(method, method.claim_epsilon) for method in methods if method.claim_epsilon is not None]
    ends = [end for end in (*(end for _, end in bars), claimed) if math.isfinite(end)]
    height = _TOP + _BAR_HEIGHT * len(bars) + _AXIS
    canvas = Canvas(
        AxisScale(0.0, 1.05 * max([*ends, 1e-9]), _NAMES, WIDTH - _NUMBERS),
        AxisScale(0.0, 1.0, height - _AXIS, _TOP),
        height,
    )
    picture = canvas.svg(
        canvas.x_axis("epsilon", 4),
        joined(_bar(canvas, method, end, index) for index, (method, end) in enumerate(bars)),
        canvas.vertical(claimed, "line claim"),
        joined(_bar_tip(method, end, index) for index, (method, end) in enumerate(bars)),
        label="Lower bounds of all methods",
    )
    kinds = ((f"area {kind}", str(kind)) for kind in Kind)
    keys = key(*kinds, ("line claim", f"claim {number(claimed)}"))
    meanings = " ".join(f"{kind.capitalize()}: {kind.meaning}." for kind in Kind)
    text = (
        f"Lower bounds on epsilon from the same scores, each with its own error rate. {meanings} Of "
        "these, the verdict rests on the first bar alone."
    )
    rows = [method_row(method) for method in methods]
    numbers = table(METHODS_HEADER, rows, words=3, label="Lower bounds of all methods, as a table")
    return figure("All methods", text, picture, numbers, keys=keys, wide=True)


def _bar(canvas: Canvas, method: MethodBound, end: float, index: int) -> Html:
    top = _TOP + index * _BAR_HEIGHT
    width = max(canvas.x(end) - canvas.x.start, 1)
    name = f"{method.name}, {method.bound.threshold_rule.label:.14}" if index else "verdict"
    text = "tick end" if index else "tick end strong"
    return joined(
        [
            element("text", name, class_=text, x=_NAMES - 8, y=top + 16),
            element("rect", class_=f"area {method.bound.kind}", x=_NAMES, y=top + 6, width=width, height=12),
            element("text", number(end), class_=text, x=WIDTH - 2, y=top + 16),
        ]
    )


def _bar_tip(method: MethodBound, end: float, index: int) -> Html:
    bound, top = method.bound, _TOP + index * _BAR_HEIGHT
    # the statement names the kind of the bound
    tip = (
        f"{method.name}\n{bound.statement}\ncomparable to the claim: epsilon >= {number(end)}\n{bound.label}"
    )
    return element("rect", class_="hit", x=0, y=top, width=WIDTH, height=_BAR_HEIGHT, data_tip=tip)

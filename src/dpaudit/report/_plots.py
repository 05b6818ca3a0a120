"""The plots of a report as SVG, each with a table of its numbers; they need no library and no network.

- :func:`scores_plot`: the scores with and without the canary.
- :func:`trajectory_plot`: the bound over time.
- :func:`comparison_plot`: the bounds of several runs over time.
- :func:`tradeoff_plot`: the error rates that the claim allows, and those that were measured.
- :func:`roc_plot`: the true positive rates of the attack, with a band.
- :func:`methods_plot`: the bounds of all methods, with the claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dpaudit import _validate
from dpaudit._html import Html, element, joined
from dpaudit.recording import Trajectory
from dpaudit.report._plot_data import Histogram
from dpaudit.report._run import METHODS_HEADER, MethodBound, Run, method_row
from dpaudit.report._svg import WIDTH, AxisScale, Canvas, Numbers, figure, number
from dpaudit.stats import ErrorRatePlane, Kind, RocBand, Verdict

_BAR_HEIGHT = 24  # including the space around a bar
_TOP, _AXIS = 4, 46  # space above and below the bars
_NAMES, _NUMBERS = 192, 52  # space for text on the left and on the right
_PLANE_HEIGHT = 300


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
    keys = [("area with", "with the canary"), ("line without", "without it")]
    if scores.threshold is not None:
        keys.append(("line threshold", f"threshold {number(scores.threshold)}"))
        if scores.edges[0] <= scores.threshold <= scores.edges[-1]:
            marks.append(canvas.vertical(scores.threshold, "line threshold"))
    rows = [
        [f"{number(low)} to {number(high)}", *(f"{sides[k][i]:,} ({percent[k][i]:.2g} %)" for k in (0, 1))]
        for i, (low, high) in enumerate(pairwise(scores.edges))
    ]
    numbers = Numbers(("score", "with", "without"), rows)
    middles = list((scores.edges[1:] + scores.edges[:-1]) / 2)
    picture = canvas.svg(*marks, canvas.strips(middles, numbers.tips), label="Histogram of scores")
    text = (
        f"{sides[0].sum():,} scores with the canary and {sides[1].sum():,} without it. The further apart "
        "they are, the better an attacker can distinguish them; in the overlap, a score may come from either."
    )
    return figure("Scores", text, picture, numbers, keys=keys, wide=wide)


def trajectory_plot(run: Run, trajectory: Trajectory, *, wide: bool = False) -> Html:
    """Draw the live bound of a run with its band, the estimate, and the claim."""
    points, claimed = trajectory.points, run.claim.epsilon
    steps = [float(point.num_done) for point in points]
    lower, upper = [point.epsilon for point in points], [point.upper for point in points]
    numbers = Numbers(
        (_axis_name(run), "lower bound", "estimate", "top of the band"),
        [
            (f"{point.num_done:,}", number(point.epsilon), number(point.estimate), number(point.upper))
            for point in points
        ],
        words=0,
    )
    canvas = _bounds_canvas([trajectory], claimed, (steps[0], steps[-1]))
    tone = _tone(run)
    picture = canvas.svg(
        canvas.axes(_axis_name(run), "epsilon"),
        canvas.inside(
            canvas.area(steps, lower, upper, f"area band {tone}"),
            canvas.line(steps, [point.estimate for point in points], f"line estimate {tone}"),
            canvas.line(steps, lower, f"line bound {tone}"),
        ),
        canvas.horizontal(claimed, "line claim"),
        canvas.strips(steps, numbers.tips),
        label="Lower bound on epsilon over time",
    )
    keys = [
        (f"line bound {tone}", "lower bound"),
        (f"area band {tone}", "band"),
        (f"line estimate {tone}", "estimate"),
        ("line claim", f"claim {number(claimed)}"),
    ]
    text = (
        f"The lower bound on epsilon holds at every {run.counted} simultaneously. If it rises above the "
        "claim, the claim is refuted, and the run may be stopped. The band is what this attack can show if "
        "its error rate is constant; a better attack may show more."
    )
    if not run.figures.of_verdict:
        text += f" The verdict rests on another method, with a bound of {number(run.bound.epsilon)}."
    return figure("Bound over time", text, picture, numbers, keys=keys, wide=wide)


def comparison_plot(runs: Sequence[Run]) -> Html | None:
    """Draw the live bounds of the first runs that have one; None if there are fewer than two."""
    dashes = ("one", "two", "three", "four")  # classes of lines, one per run
    live = [run for run in runs if run.figures.course is not None][: len(dashes)]
    if len(live) < 2:
        return None
    names, claims = [run.name for run in live], sorted({run.claim.epsilon for run in live})
    trajectories = [run.figures.course for run in live if run.figures.course is not None]
    percents = _percents(max(trajectories, key=lambda trajectory: len(trajectory.points)))
    numbers = Numbers(("observations", *names), [_bounds_at(trajectories, percent) for percent in percents])
    canvas = _bounds_canvas(trajectories, claims[-1], (0.0, 100.0))
    lines = list(map("line run {} {}".format, dashes, map(_tone, live)))
    picture = canvas.svg(
        canvas.axes(f"{_axis_name(live[0])}, %", "epsilon"),
        *(
            canvas.line(_percents(trajectory), [point.epsilon for point in trajectory.points], line)
            for trajectory, line in zip(trajectories, lines, strict=True)
        ),
        *(canvas.horizontal(claim, "line claim") for claim in claims),
        canvas.strips(percents, numbers.tips),
        label="Lower bounds of all runs",
    )
    keys = [*zip(lines, names, strict=True), ("line claim", "claim " + ", ".join(map(number, claims)))]
    text = (
        "The lower bound on epsilon of each run over time, by betting on its errors. A bound above its claim "
        "refutes the claim."
    )
    return figure("Bounds over time", text, picture, numbers, keys=keys, wide=True)


def _tone(run: Run) -> str:
    """Return the class of a mark that has the color of the verdict."""
    if run.verdict is None or run.verdict is Verdict.NO_VIOLATION:
        return "neutral"
    return run.verdict.name.lower()


def _axis_name(run: Run) -> str:
    return "training steps" if run.counted == "step" else f"{run.counted}s"


def _bounds_at(trajectories: Sequence[Trajectory], percent: float) -> list[str]:
    """Return the row of a table: the first bound of each run at this percentage or later."""
    points = [zip(trajectory.points, _percents(trajectory), strict=True) for trajectory in trajectories]
    bounds = [next(point.epsilon for point, at in pairs if at >= percent - 1e-9) for pairs in points]
    return [f"{percent:.0f} %", *map(number, bounds)]


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


def tradeoff_plot(plane: ErrorRatePlane, *, wide: bool = False) -> Html:
    """Draw the claimed curve, the curve of the bound, and the measured rates with their region."""
    columns, counts, level = (plane.fpr, plane.claimed, plane.bound), plane.counts, plane.confidence
    shown = np.unique(np.linspace(0, plane.fpr.size - 1, min(40, plane.fpr.size)).round().astype(int))
    numbers = Numbers(
        ("false positive rate", "claimed curve", "curve of the bound"),
        [[number(column[i]) for column in columns] for i in shown],
        words=0,
    )
    canvas = Canvas.of((0.0, 1.0), (0.0, 1.0), _PLANE_HEIGHT)
    picture = canvas.svg(
        canvas.axes("false positive rate", "false negative rate"),
        canvas.line((0.0, 1.0), (1.0, 0.0), "line nothing"),
        canvas.inside(
            canvas.area(list(plane.fpr), [0.0] * plane.fpr.size, list(plane.claimed), "area impossible"),
            canvas.box(*plane.region, "area region"),
            canvas.line(plane.fpr, plane.claimed, "line curve"),
            canvas.line(plane.fpr, plane.bound, "line bound"),
        ),
        element("circle", class_="dot measured", cx=canvas.x(counts.fpr), cy=canvas.y(counts.fnr), r=3.5),
        canvas.strips(list(plane.fpr[shown]), numbers.tips),
        label="Trade-off between the two error rates",
    )
    (low, high), (less, more) = (tuple(map(number, ends)) for ends in plane.region)
    text = (
        "If the claim holds, the error rates of every attack are on or above the claimed curve: the "
        "shaded region is out of reach. On the dotted diagonal, an attacker learns nothing. Measured: a "
        f"false positive rate of {number(counts.fpr)} ({low} to {high}) and a false negative rate of "
        f"{number(counts.fnr)} ({less} to {more}). The box contains both true rates with "
        f"{_validate.percent(level)} confidence, if all observations are independent (Clopper-Pearson, with "
        "half of the error for each rate). The curve of the bound is the leakiest curve that is refuted."
    )
    keys = [
        ("line curve", "claimed curve"),
        ("line bound", "curve of the bound"),
        ("area region", "measured rates, with their region"),
    ]
    return figure("Trade-off", text, picture, numbers, keys=keys, wide=wide)


def roc_plot(roc: RocBand, *, wide: bool = False) -> Html:
    """Draw the true positive rates that the attack reached, their intervals, and the claimed curve."""
    fpr, seen = roc.fpr, np.concatenate([roc.claimed, roc.reached])
    least = 10 ** math.floor(math.log10(max(float(seen[seen > 0].min(initial=1.0)), 1e-6)))
    columns = fpr, roc.claimed, roc.reached, roc.low, roc.high
    numbers = Numbers(
        ("false positive rate", "claimed, at most", "this attack", "from", "to"),
        [[number(column[i]) for column in columns] for i in range(fpr.size)],
        words=0,
    )
    canvas = Canvas.of((float(fpr[0]), 1.0), (min(least, 0.1), 1.0), _PLANE_HEIGHT, log=True)
    corners = np.repeat(fpr, 2)[1:-1]  # a rate between two of the grid has the wider end of both
    low, high = np.repeat(roc.low[:-1], 2), np.repeat(roc.high[1:], 2)
    picture = canvas.svg(
        canvas.axes("false positive rate", "true positive rate"),
        canvas.inside(
            canvas.area(list(corners), list(low), list(high), "area band"),
            canvas.line(fpr, fpr, "line nothing"),
            canvas.line(fpr, roc.claimed, "line curve"),
            canvas.line(fpr, roc.reached, "line bound"),
        ),
        canvas.strips(list(fpr), numbers.tips),
        label="True positive rates of the attack",
    )
    level = _validate.percent(roc.confidence)
    text = (
        "How many of the present canaries this attack recognizes if it may be wrong about some of the absent "
        f"ones. Each interval (not all at once) contains its rate with {level} confidence, if scores, "
        "or steps that canaries share, are independent. No attack may be above the claimed curve. The upper "
        "ends are about this attack: another may recognize more. The verdict does not rest on this estimate."
    )
    keys = [
        ("line curve", "claimed curve"),
        ("line bound", "this attack"),
        ("area band", f"{level} intervals"),
    ]
    return figure("True positive rates", text, picture, numbers, keys=keys, wide=wide)


def methods_plot(run: Run) -> Html:
    """Draw one bar per method: every epsilon within it is refuted. The verdict's own bound comes first."""
    claimed, methods = run.claim.epsilon, [run.verdict_bound, *run.methods]
    numbers = Numbers(METHODS_HEADER, [method_row(method) for method in methods], words=3)
    compared = [
        (method, method.claim_epsilon, tip)
        for method, tip in zip(methods, numbers.tips, strict=True)
        if method.claim_epsilon is not None
    ]
    ends = [end for end in (*(end for _, end, _ in compared), claimed) if math.isfinite(end)]
    height = _TOP + _BAR_HEIGHT * len(compared) + _AXIS
    canvas = Canvas(
        AxisScale(0.0, 1.05 * max([*ends, 1e-9]), _NAMES, WIDTH - _NUMBERS, most=4),
        AxisScale(0.0, 1.0, height - _AXIS, _TOP),
        height,
    )
    tops = [_TOP + index * _BAR_HEIGHT for index in range(len(compared))]
    picture = canvas.svg(
        canvas.axes("epsilon"),
        joined(_bar(canvas, method, end, top) for (method, end, _), top in zip(compared, tops, strict=True)),
        canvas.vertical(claimed, "line claim"),
        joined(
            element("rect", class_="hit", x=0, y=top, width=WIDTH, height=_BAR_HEIGHT, data_tip=tip)
            for (_, _, tip), top in zip(compared, tops, strict=True)
        ),
        label="Lower bounds of all methods",
    )
    kinds = [(f"area {kind}", str(kind)) for kind in Kind]
    meanings = " ".join(f"{kind.capitalize()}: {kind.meaning}." for kind in Kind)
    text = (
        f"Lower bounds on epsilon from the same scores, each with its own error rate. {meanings} Of "
        "these, the verdict rests on the first bar alone."
    )
    keys = [*kinds, ("line claim", f"claim {number(claimed)}")]
    return figure("All methods", text, picture, numbers, keys=keys, wide=True)


def _bar(canvas: Canvas, method: MethodBound, end: float, top: float) -> Html:
    is_verdict = top == _TOP
    width = max(canvas.x(end) - canvas.x.start, 1)
    name = method.name if is_verdict else f"{method.name}, {method.bound.threshold_rule.label:.14}"
    text = "tick end strong" if is_verdict else "tick end"
    return joined(
        [
            element("text", name, class_=text, x=_NAMES - 8, y=top + 16),
            element("rect", class_=f"area {method.bound.kind}", x=_NAMES, y=top + 6, width=width, height=12),
            element("text", number(end), class_=text, x=WIDTH - 2, y=top + 16),
        ]
    )

"""Pictures as SVG: no library, no network, and each with its numbers as a table.

The bound after more and more observations. The bounds of all methods beside each other, with the claim. The
plane of the two error rates, as a whole and near what was measured. How the scores with and without the
canary lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dpaudit._html import Html, element, joined
from dpaudit._types import FloatArray
from dpaudit.recording import Course, Moment
from dpaudit.report._figures import Histogram
from dpaudit.report._run import Run
from dpaudit.report._svg import WIDTH, Canvas, Scale, figure, key, number, table
from dpaudit.report._values import BoundValues, ClaimValues
from dpaudit.stats._result import Plane

_DASHES = ("one", "two", "three", "four")  # classes of lines, by which runs are told apart


def course_figure(run: Run, course: Course, *, wide: bool = False) -> Html:
    """The live bound with its band, the estimate, and the claim."""
    moments = course.moments
    steps = [float(one.num_done) for one in moments]
    canvas = _canvas([course], run.claim.epsilon)
    picture = canvas.svg(
        canvas.axes(f"{run.counted}s", "epsilon"),
        canvas.inside(
            canvas.area(steps, [one.epsilon for one in moments], [one.upper for one in moments], "area band"),
            canvas.line(steps, [one.estimate for one in moments], "line estimate"),
            canvas.line(steps, [one.epsilon for one in moments], "line bound"),
        ),
        canvas.horizontal(run.claim.epsilon, "line claim"),
        canvas.strips(steps, [_tip_course(one, run) for one in moments]),
        label="Lower bound on epsilon over time",
    )
    keys = key(
        ("line bound", "lower bound"),
        ("area band", "band"),
        ("line estimate", "estimate"),
        ("line claim", f"claim {number(run.claim.epsilon)}"),
    )
    return figure(
        "Bound over time",
        _text_course(run, course),
        picture,
        _table_course(run, moments),
        keys=keys,
        wide=wide,
    )


def compared_figure(runs: Sequence[Run]) -> Html | None:
    """The live bounds of several runs over each other; None if no two runs have one."""
    drawn = [(run, run.figures.course) for run in runs if run.figures.course is not None][: len(_DASHES)]
    if len(drawn) < 2:
        return None
    canvas = _canvas([course for _, course in drawn], max(run.claim.epsilon for run, _ in drawn))
    marks = [canvas.axes("observations, in % of those made", "epsilon")]
    for (_, course), dash in zip(drawn, _DASHES, strict=False):
        marks.append(
            canvas.line(_percent(course), [one.epsilon for one in course.moments], f"line run {dash}")
        )
    claims = sorted({run.claim.epsilon for run, _ in drawn})
    marks += [canvas.horizontal(claim, "line claim") for claim in claims]
    longest = max((course for _, course in drawn), key=lambda course: len(course.moments))
    tips = [_tips_at(drawn, percent) for percent in _percent(longest)]
    picture = canvas.svg(*marks, canvas.strips(_percent(longest), tips), label="Lower bounds of all runs")
    keys = key(
        *((f"line run {dash}", run.name) for (run, _), dash in zip(drawn, _DASHES, strict=False)),
        ("line claim", "claim " + ", ".join(map(number, claims))),
    )
    rows = [[f"{percent:.0f} %", *_at(drawn, percent)] for percent in _percent(longest)]
    numbers = table(("made", *(run.name for run, _ in drawn)), rows, label="Lower bounds, as a table")
    return figure("Bounds over time", _COMPARED, picture, numbers, keys=keys, wide=True)


_COMPARED = (
    "The lower bound on epsilon of each run while it went on, by bets on its errors. A bound above its claim "
    "refutes the claim."
)


def _canvas(courses: Sequence[Course], claim: float) -> Canvas:
    """Room for bounds and claims; bands may leave it."""
    alone = len(courses) == 1
    moments = [one for course in courses for one in course.moments]
    last = max(course.moments[-1].num_done for course in courses)
    first = min(course.moments[0].num_done for course in courses)
    heights = [one.epsilon for one in moments] + [course.moments[-1].estimate for course in courses] + [claim]
    top = max((height for height in heights if math.isfinite(height)), default=1.0) or 1.0
    across = (float(first), float(last)) if alone else (0.0, 100.0)
    return Canvas.of(across, (0.0, 1.25 * top), counts=True)


def _percent(course: Course) -> list[float]:
    last = course.moments[-1].num_done
    return [100 * one.num_done / last for one in course.moments]


def _at(drawn: Sequence[tuple[Run, Course]], percent: float) -> list[str]:
    return [
        number(
            next(one.epsilon for one, at in zip(c.moments, _percent(c), strict=True) if at >= percent - 1e-9)
        )
        for _, c in drawn
    ]


def _tips_at(drawn: Sequence[tuple[Run, Course]], percent: float) -> str:
    bounds = zip(drawn, _at(drawn, percent), strict=True)
    return "\n".join([f"{percent:.0f} % made", *(f"{run.name}: epsilon >= {b}" for (run, _), b in bounds)])


def _text_course(run: Run, course: Course) -> str:
    level = f"{100 * course.confidence:g} %"
    text = (
        f"Bets on the errors give a lower bound that holds at every {run.counted} at once, with {level} "
        "confidence: a run may be stopped because of it. The band ends where the leak that this attack shows "
        f"would end, also with {level}, if its error rate does not change; a better attack may show more."
    )
    if run.figures.of_verdict:
        return text
    return f"{text} The verdict rests on another method, with a bound of {number(run.bound.epsilon)}."


def _tip_course(one: Moment, run: Run) -> str:
    return (
        f"{run.counted} {one.num_done:,}\nepsilon >= {number(one.epsilon)}\n"
        f"estimate {number(one.estimate)}, band to {number(one.upper)}\nclaim {number(run.claim.epsilon)}"
    )


def _table_course(run: Run, moments: Sequence[Moment]) -> Html:
    header = (f"{run.counted}s", "lower bound", "estimate", "end of the band")
    rows = [(f"{m.num_done:,}", number(m.epsilon), number(m.estimate), number(m.upper)) for m in moments]
    return table(header, rows, words=0, label="The bound over time, as a table")


_ROW = 24
_NAMES, _NUMBERS = 168, 52  # room for text on the left and on the right
_RULES = {
    "Simultaneous": "bands",
    "Predictable": "predictable",
    "SameData": "same data",
    "HeldOut": "held out",
}


def methods_figure(verdict: BoundValues, methods: Sequence[BoundValues], claim: ClaimValues) -> Html:
    """A bar a method: what lies under it is refuted. The verdict's own bound comes first."""
    rows = [verdict, *(row for row in methods if row.whole is not None)]
    ends = [row.whole for row in rows if row.whole is not None and math.isfinite(row.whole)]
    most = 1.05 * max([*ends, claim.epsilon if math.isfinite(claim.epsilon) else 0.0, 1e-9])
    height = _ROW * len(rows) + 50
    canvas = Canvas(Scale(0.0, most, _NAMES, WIDTH - _NUMBERS), Scale(0.0, 1.0, height - 46, 4), height)
    picture = canvas.svg(
        _axis(canvas),
        joined(_row(canvas, row, place, row is verdict) for place, row in enumerate(rows)),
        canvas.vertical(claim.epsilon, "line claim"),
        joined(_hit(row, place) for place, row in enumerate(rows)),
        label="Lower bounds of all methods",
    )
    keys = key(
        ("area confidence", "confidence"),
        ("area credible", "credible"),
        ("area heuristic", "heuristic"),
        ("line claim", f"claim {number(claim.epsilon)}"),
    )
    return figure("All methods", _TEXT, picture, _table_methods([verdict, *methods]), keys=keys, wide=True)


_TEXT = (
    "Lower bounds on epsilon from the same scores. A confidence bound exceeds the truth at most as often as "
    "it says, each for itself; a credible one depends on a prior, and of a heuristic one no error rate is "
    "known. The verdict rests on the first bar alone."
)


def _axis(canvas: Canvas) -> Html:
    bottom = canvas.y.start
    marks = []
    for tick in canvas.x.ticks(4):
        at = canvas.x(tick)
        marks.append(element("line", class_="grid", x1=at, x2=at, y1=4, y2=bottom))
        marks.append(element("text", canvas.x.label(tick, 4), class_="tick middle", x=at, y=bottom + 16))
    middle = (canvas.x.start + canvas.x.end) / 2
    marks.append(element("text", "epsilon", class_="axis middle", x=middle, y=canvas.height - 8))
    return joined(marks)


def _row(canvas: Canvas, row: BoundValues, place: int, is_verdict: bool) -> Html:
    top = 4 + place * _ROW
    width = canvas.x(row.whole or 0.0) - canvas.x.start
    weight = " strong" if is_verdict else ""
    return joined(
        [
            element("text", _name(row, is_verdict), class_=f"tick end{weight}", x=_NAMES - 8, y=top + 16),
            element("rect", class_=f"area {row.kind}", x=_NAMES, y=top + 6, width=max(width, 1), height=12),
            element(
                "text", number(row.whole), class_=f"tick end{weight}", x=WIDTH - 2, y=top + 16
            ),
        ]
    )  # fmt: skip


def _hit(row: BoundValues, place: int) -> Html:
    return element(
        "rect", class_="hit", x=0, y=4 + place * _ROW, width=WIDTH, height=_ROW, data_tip=_tip_methods(row)
    )


def _name(row: BoundValues, is_verdict: bool) -> str:
    return "verdict" if is_verdict else f"{row.name}, {_rule(row)}"


def _rule(row: BoundValues) -> str:
    name = row.rule.split("(")[0]
    return f"at {number(row.threshold)}" if name == "Fixed" else _RULES.get(name, name[:12])


def _tip_methods(row: BoundValues) -> str:
    # a kind is part of the statement
    whole = "" if row.whole is None else f"\nfor the claim: epsilon >= {number(row.whole)}"
    return f"{row.name}\n{row.statement}{whole}\n{row.method}"


def _table_methods(rows: Sequence[BoundValues]) -> Html:
    header = ("method", "threshold", "kind", "epsilon", "for the claim")
    cells = [(row.name, _rule(row), str(row.kind), number(row.epsilon), number(row.whole)) for row in rows]
    return table(header, cells, words=3, label="Bounds of all methods, as a table")


_HITS = 40
_HEIGHT = 300
_MUCH = 0.6  # of the plane


def plane_figure(plane: Plane, *, wide: bool = False) -> Html:
    """What the claim allows and what was measured."""
    canvas = Canvas.of((0.0, 1.0), (0.0, 1.0), _HEIGHT)
    picture = canvas.svg(
        canvas.axes("false positive rate", "false negative rate"),
        canvas.line((0.0, 1.0), (1.0, 0.0), "line nothing"),
        *_marks(canvas, plane),
        label="The two error rates",
    )
    text = (
        "Every attack on a training that is what it claims errs at least as often as the claimed curve says: "
        "the shaded part is out of its reach. On the dotted diagonal an attacker learns nothing."
    )
    return figure("Trade-off", text, picture, _curves(plane), keys=_key_plane(), wide=wide)


def close_figure(plane: Plane, *, wide: bool = False) -> Html:
    """The same around what was measured."""
    x, y = _around(plane)
    canvas = Canvas.of(x, y, _HEIGHT)
    picture = canvas.svg(
        canvas.axes("false positive rate", "false negative rate"),
        *_marks(canvas, plane),
        label="The two error rates, near what was measured",
    )
    level = f"{100 * plane.confidence:g} %"
    text = (
        f"The box holds both true rates with {level} confidence, if all observations are independent "
        "(Clopper and Pearson, half of the error for each rate). The bound's curve is the leakiest one that "
        "was refuted."
    )
    title = "Trade-off, near what was measured"
    return figure(title, text, picture, _measured(plane), keys=_key_plane(), wide=wide)


def needs_close_figure(plane: Plane) -> bool:
    """Whether there is anything to see that the whole plane does not show as well."""
    (low, high), _ = _around(plane)
    return high - low < _MUCH


def _key_plane() -> Html:
    return key(
        ("line curve", "claimed curve"),
        ("line bound", "the bound's curve"),
        ("area region", "measured, with its region"),
    )


def _marks(canvas: Canvas, plane: Plane) -> list[Html]:
    # one point beyond either edge, so that lines go on to it
    inside = (plane.fpr >= canvas.x.low) & (plane.fpr <= canvas.x.high)
    first, last = np.flatnonzero(inside)[[0, -1]]
    kept = slice(max(first - 1, 0), last + 2)
    xs, claimed, bound = plane.fpr[kept], plane.claimed[kept], plane.bound[kept]
    floor = [canvas.y.low] * xs.size
    chosen = np.unique(np.linspace(0, xs.size - 1, min(_HITS, xs.size)).round().astype(int))
    tips = [_curve_tip(xs[i], claimed[i], bound[i]) for i in chosen]
    fpr, fnr = plane.region
    point = element(
        "circle", class_="dot measured", cx=canvas.x(plane.counts.fpr), cy=canvas.y(plane.counts.fnr), r=3.5
    )
    return [
        canvas.inside(
            canvas.area(list(xs), floor, list(claimed), "area impossible"),
            canvas.box(fpr, fnr, "area region"),
            canvas.line(xs, claimed, "line curve"),
            canvas.line(xs, bound, "line bound"),
            canvas.strips(list(xs[chosen]), tips),
        ),
        point,
        canvas.hot(plane.counts.fpr, plane.counts.fnr, _point_tip(plane)),
    ]


def _around(plane: Plane) -> tuple[tuple[float, float], tuple[float, float]]:
    """A square window with the region and the claimed curve next to it."""
    fpr, fnr = plane.counts.fpr, plane.counts.fnr
    sides = [high - low for low, high in plane.region]
    gap = float(np.min(np.abs(plane.claimed - fnr) + np.abs(plane.fpr - fpr)))
    reach = min(max(1.5 * max(sides), 1.4 * gap, 0.005), 0.5)
    middle = [min(max(rate, reach), 1 - reach) for rate in (fpr, fnr)]
    return (middle[0] - reach, middle[0] + reach), (middle[1] - reach, middle[1] + reach)


def _curve_tip(fpr: float, claimed: float, bound: float) -> str:
    return (
        f"at a false positive rate of {number(fpr)}\nclaimed: false negative rate >= {number(claimed)}\n"
        f"the bound's curve: {number(bound)}"
    )


def _point_tip(plane: Plane) -> str:
    (low, high), (less, more) = plane.region
    return (
        f"measured\nfalse positive rate {number(plane.counts.fpr)}, in {number(low)} to {number(high)}\n"
        f"false negative rate {number(plane.counts.fnr)}, in {number(less)} to {number(more)}"
    )


def _curves(plane: Plane) -> Html:
    chosen = np.unique(np.linspace(0, plane.fpr.size - 1, _HITS).round().astype(int))
    rows = [(number(plane.fpr[i]), number(plane.claimed[i]), number(plane.bound[i])) for i in chosen]
    header = ("false positive rate", "claimed curve", "the bound's curve")
    return table(header, rows, words=0, label="The curves, as a table")


def _measured(plane: Plane) -> Html:
    counts, (fpr, fnr) = plane.counts, plane.region
    rows = [
        ("false positives", f"{counts.false_positives:,}", f"{counts.num_absent:,}", number(counts.fpr),
         number(fpr[0]), number(fpr[1])),
        ("false negatives", f"{counts.false_negatives:,}", f"{counts.num_present:,}", number(counts.fnr),
         number(fnr[0]), number(fnr[1])),
    ]  # fmt: skip
    header = ("", "errors", "of", "rate", "from", "to")
    return table(header, rows, label="The measured rates, as a table")


def scores_figure(found: Histogram, *, wide: bool = False) -> Html:
    """Two outlines, one filled, and the threshold."""
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
    if found.threshold is not None and found.edges[0] <= found.threshold <= found.edges[-1]:
        marks.append(canvas.vertical(found.threshold, "line threshold"))
    middles = list((found.edges[1:] + found.edges[:-1]) / 2)
    picture = canvas.svg(*marks, canvas.strips(middles, _tips(found)), label="Scores in bins")
    return figure(
        "Scores", _text_scores(found), picture, _table_scores(found), keys=_key_scores(found), wide=wide
    )


def _key_scores(found: Histogram) -> Html:
    entries = [("area with", "with the canary"), ("line without", "without it")]
    if found.threshold is not None:
        entries.append(("line threshold", f"threshold {number(found.threshold)}"))
    return key(*entries)


def _text_scores(found: Histogram) -> str:
    sizes = [int(side.sum()) for side in (found.with_canary, found.without_canary)]
    return (
        f"{sizes[0]:,} scores with the canary and {sizes[1]:,} without it. The further they lie apart, the "
        "better an attacker tells the two; what overlaps cannot be told."
    )


def _bins(edges: FloatArray) -> list[str]:
    return [f"{number(low)} to {number(high)}" for low, high in pairwise(edges)]


def _tips(found: Histogram) -> list[str]:
    sides = found.with_canary, found.without_canary
    shares = [100 * found.share(side) for side in sides]
    return [
        f"score {between}\nwith the canary: {sides[0][i]:,} ({shares[0][i]:.2g} %)\n"
        f"without it: {sides[1][i]:,} ({shares[1][i]:.2g} %)"
        for i, between in enumerate(_bins(found.edges))
    ]


def _table_scores(found: Histogram) -> Html:
    rows = [
        (between, f"{found.with_canary[i]:,}", f"{found.without_canary[i]:,}")
        for i, between in enumerate(_bins(found.edges))
    ]
    return table(("score", "with", "without"), rows, label="Scores in bins, as a table")

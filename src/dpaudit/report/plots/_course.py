"""The bound after more and more observations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpaudit._markup import Html
from dpaudit.recording import Course, Moment
from dpaudit.report._run import Run
from dpaudit.report.plots._canvas import Canvas
from dpaudit.report.plots._figure import figure, key, table
from dpaudit.report.plots._scale import number

__all__ = ["compared_figure", "course_figure"]

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
        canvas.strips(steps, [_tip(one, run) for one in moments]),
        label="Lower bound on epsilon over time",
    )
    keys = key(
        ("line bound", "lower bound"),
        ("area band", "band"),
        ("line estimate", "estimate"),
        ("line claim", f"claim {number(run.claim.epsilon)}"),
    )
    return figure("Bound over time", _text(run, course), picture, _table(run, moments), keys=keys, wide=wide)


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


def _text(run: Run, course: Course) -> str:
    level = f"{100 * course.confidence:g} %"
    text = (
        f"Bets on the errors give a lower bound that holds at every {run.counted} at once, with {level} "
        "confidence: a run may be stopped because of it. The band ends where the leak that this attack shows "
        f"would end, also with {level}, if its error rate does not change; a better attack may show more."
    )
    if run.figures.of_verdict:
        return text
    return f"{text} The verdict rests on another method, with a bound of {number(run.bound.epsilon)}."


def _tip(one: Moment, run: Run) -> str:
    return (
        f"{run.counted} {one.num_done:,}\nepsilon >= {number(one.epsilon)}\n"
        f"estimate {number(one.estimate)}, band to {number(one.upper)}\nclaim {number(run.claim.epsilon)}"
    )


def _table(run: Run, moments: Sequence[Moment]) -> Html:
    header = (f"{run.counted}s", "lower bound", "estimate", "end of the band")
    rows = [(f"{m.num_done:,}", number(m.epsilon), number(m.estimate), number(m.upper)) for m in moments]
    return table(header, rows, words=0, label="The bound over time, as a table")

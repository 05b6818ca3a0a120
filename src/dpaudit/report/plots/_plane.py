"""The plane of the two error rates, as a whole and near what was measured."""

from __future__ import annotations

import numpy as np

from dpaudit._markup import Html, element
from dpaudit.report.plots._canvas import Canvas
from dpaudit.report.plots._figure import figure, key, table
from dpaudit.report.plots._scale import number
from dpaudit.stats._plane import Plane

__all__ = ["close_figure", "needs_close_figure", "plane_figure"]

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
    return figure("Trade-off", text, picture, _curves(plane), keys=_key(), wide=wide)


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
    return figure(title, text, picture, _measured(plane), keys=_key(), wide=wide)


def needs_close_figure(plane: Plane) -> bool:
    """Whether there is anything to see that the whole plane does not show as well."""
    (low, high), _ = _around(plane)
    return high - low < _MUCH


def _key() -> Html:
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

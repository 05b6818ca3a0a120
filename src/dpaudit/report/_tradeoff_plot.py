"""The trade-off plot as SVG: the error rates that the claim allows, and those that were measured.

It is drawn as a whole and, where that shows more, near what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit._html import Html, element
from dpaudit._types import IntArray
from dpaudit.report._svg import Canvas, figure, key, number, table
from dpaudit.stats._result import Plane

_HEIGHT = 300
_NUM_TIPS = 40  # of the curves
_WIDE_CLOSEUP = 0.6  # a window of this width shows nothing that the whole plot does not
_AXES = "false positive rate", "false negative rate"


@dataclass(frozen=True)
class TradeoffPlot:
    """The claimed curve, the curve of the bound, and the measured rates with their region."""

    plane: Plane

    def whole(self, *, wide: bool = False) -> Html:
        """Draw all rates from 0 to 1."""
        canvas = Canvas.of((0.0, 1.0), (0.0, 1.0), _HEIGHT)
        picture = canvas.svg(
            canvas.axes(*_AXES),
            canvas.line((0.0, 1.0), (1.0, 0.0), "line nothing"),
            *self._marks(canvas),
            label="The two error rates",
        )
        text = (
            "Every attack on a training that is what it claims errs at least as often as the claimed curve "
            "says: the shaded part is out of its reach. On the dotted diagonal an attacker learns nothing."
        )
        return figure("Trade-off", text, picture, self._table_of_curves(), keys=self._key(), wide=wide)

    @property
    def needs_closeup(self) -> bool:
        """Whether a close-up shows anything that the whole plot does not show as well."""
        (low, high), _ = self._window()
        return high - low < _WIDE_CLOSEUP

    def closeup(self, *, wide: bool = False) -> Html:
        """Draw the part around what was measured."""
        canvas = Canvas.of(*self._window(), _HEIGHT)
        picture = canvas.svg(
            canvas.axes(*_AXES),
            *self._marks(canvas),
            label="The two error rates, near what was measured",
        )
        text = (
            f"The box holds both true rates with {100 * self.plane.confidence:g} % confidence, if all "
            "observations are independent (Clopper and Pearson, half of the error for each rate). The "
            "bound's curve is the leakiest one that was refuted."
        )
        title = "Trade-off, near what was measured"
        return figure(title, text, picture, self._table_of_rates(), keys=self._key(), wide=wide)

    def _window(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """A square with the region and the claimed curve next to it."""
        plane, (fpr, fnr) = self.plane, (self.plane.counts.fpr, self.plane.counts.fnr)
        sides = [high - low for low, high in plane.region]
        gap = float(np.min(np.abs(plane.claimed - fnr) + np.abs(plane.fpr - fpr)))
        reach = min(max(1.5 * max(sides), 1.4 * gap, 0.005), 0.5)
        middle = [min(max(rate, reach), 1 - reach) for rate in (fpr, fnr)]
        return (middle[0] - reach, middle[0] + reach), (middle[1] - reach, middle[1] + reach)

    def _marks(self, canvas: Canvas) -> list[Html]:
        plane, counts = self.plane, self.plane.counts
        # one point beyond either edge, so that lines go on to it
        inside = (plane.fpr >= canvas.x.low) & (plane.fpr <= canvas.x.high)
        first, last = np.flatnonzero(inside)[[0, -1]]
        kept = slice(max(first - 1, 0), last + 2)
        xs, claimed, bound = plane.fpr[kept], plane.claimed[kept], plane.bound[kept]
        chosen = _evenly(xs.size)
        tips = [_curve_tip(xs[i], claimed[i], bound[i]) for i in chosen]
        return [
            canvas.inside(
                canvas.area(list(xs), [canvas.y.low] * xs.size, list(claimed), "area impossible"),
                canvas.box(*plane.region, "area region"),
                canvas.line(xs, claimed, "line curve"),
                canvas.line(xs, bound, "line bound"),
                canvas.strips(list(xs[chosen]), tips),
            ),
            element("circle", class_="dot measured", cx=canvas.x(counts.fpr), cy=canvas.y(counts.fnr), r=3.5),
            canvas.hot(counts.fpr, counts.fnr, self._measured_tip()),
        ]

    def _measured_tip(self) -> str:
        counts, ((low, high), (less, more)) = self.plane.counts, self.plane.region
        return (
            f"measured\nfalse positive rate {number(counts.fpr)}, in {number(low)} to {number(high)}\n"
            f"false negative rate {number(counts.fnr)}, in {number(less)} to {number(more)}"
        )

    @staticmethod
    def _key() -> Html:
        return key(
            ("line curve", "claimed curve"),
            ("line bound", "the bound's curve"),
            ("area region", "measured, with its region"),
        )

    def _table_of_curves(self) -> Html:
        plane = self.plane
        rows = [
            (number(plane.fpr[i]), number(plane.claimed[i]), number(plane.bound[i]))
            for i in _evenly(plane.fpr.size)
        ]
        header = ("false positive rate", "claimed curve", "the bound's curve")
        return table(header, rows, words=0, label="The curves, as a table")

    def _table_of_rates(self) -> Html:
        counts, (fpr, fnr) = self.plane.counts, self.plane.region
        rows = [
            ("false positives", f"{counts.false_positives:,}", f"{counts.num_absent:,}", number(counts.fpr),
             number(fpr[0]), number(fpr[1])),
            ("false negatives", f"{counts.false_negatives:,}", f"{counts.num_present:,}", number(counts.fnr),
             number(fnr[0]), number(fnr[1])),
        ]  # fmt: skip
        header = ("", "errors", "of", "rate", "from", "to")
        return table(header, rows, label="The measured rates, as a table")


def _evenly(size: int) -> IntArray:
    """The places of at most so many of ``size`` points as have a tip, both ends among them."""
    return np.unique(np.linspace(0, size - 1, min(_NUM_TIPS, size)).round().astype(int))


def _curve_tip(fpr: float, claimed: float, bound: float) -> str:
    return (
        f"at a false positive rate of {number(fpr)}\nclaimed: false negative rate >= {number(claimed)}\n"
        f"the bound's curve: {number(bound)}"
    )

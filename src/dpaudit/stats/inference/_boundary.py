"""Where outcomes stop being rare, in the plane of both error rates."""

from __future__ import annotations

import math

import numpy as np

from dpaudit.stats._binomial import Region
from dpaudit.stats._search import last_positive
from dpaudit.stats._types import BoolArray, FloatArray
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["Boundary"]

_CLOSE = 1e-5  # relative, on the parameter
_HUGE = 1e300  # in the place of infinity
_HALVINGS = 6  # of the distance of places, at most


class Boundary:
    """For every fpr the fnr at which the outcomes have probability ``limit``; ``near`` is a guess of one.

    The curve of a larger parameter has a smaller fnr, at which the outcomes are more probable. So they are
    rare at every fpr for the parameters below those of all points of the boundary.
    """

    def __init__(self, region: Region, limit: float, tradeoff: TradeOff, near: float) -> None:
        self._region, self._limit, self._tradeoff, self._near = region, limit, tradeoff, near

    def least_parameter(self, angles: FloatArray) -> float:
        """The least parameter on the boundary; the fpr is the squared sine of an angle."""
        angles, fnr = self._with_bend(angles, self._along(angles))
        values = self._parameters(angles, fnr)
        least = float(values.min())
        if least == 0:
            return least
        padded = np.pad(values, 1, mode="edge")
        lower, higher = np.sort([padded[:-2], padded[2:]], axis=0)
        valleys = np.flatnonzero((values <= lower) & _may_be_deeper(values, higher, least))
        return min([least, *(self._bottom(angles, fnr, int(valley)) for valley in valleys)])

    def _bottom(self, angles: FloatArray, fnr: FloatArray, valley: int) -> float:
        """The least parameter between the neighbours of a valley: look halfway to them, and again."""
        for _ in range(_HALVINGS):
            around = slice(max(valley - 1, 0), valley + 2)
            angles, fnr = self._halved(angles[around], fnr[around])
            values = self._parameters(angles, fnr)
            valley = int(values.argmin())
            higher = values[max(valley - 1, 0) : valley + 2].max()
            if not _may_be_deeper(values[valley], higher, values[valley]):
                break
        return float(values[valley])

    def _halved(self, angles: FloatArray, fnr: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The same with the places halfway between."""
        between = (angles[:-1] + angles[1:]) / 2
        near = (fnr[:-1] + fnr[1:]) / 2
        found = [self._fnr(angle, guess) for angle, guess in zip(between, near, strict=True)]
        places = np.arange(1, angles.size)
        return np.insert(angles, places, between), np.insert(fnr, places, found)

    def _parameters(self, angles: FloatArray, fnr: FloatArray) -> FloatArray:
        return np.minimum(self._tradeoff.parameter(np.sin(angles) ** 2, fnr), _HUGE)

    def _with_bend(self, angles: FloatArray, fnr: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Add where both rates are equal: there a curve may bend."""

        def margin(rate: float) -> float:
            return self._region.probability(rate, rate) - self._limit

        rate = min(last_positive(margin, 0.1, tolerance=1e-6) * (1 + 1e-6), 0.5)
        bend = math.asin(math.sqrt(rate))
        place = int(np.searchsorted(angles, bend))
        if not 0 < place < angles.size:
            return angles, fnr
        return np.insert(angles, place, bend), np.insert(fnr, place, rate)

    def _along(self, angles: FloatArray) -> FloatArray:
        """The boundary at each angle; two points make a guess of the next."""
        found: list[float] = []
        near = self._near
        for angle in angles:
            found.append(self._fnr(angle, near))
            if 0 < found[-1] < 1:
                near = found[-1]
                if len(found) > 1 and found[-2] > 0:
                    near *= min(found[-1] / found[-2], 1.0)
        return np.asarray(found)

    def _fnr(self, angle: float, near: float) -> float:
        return self._region.fnr(math.sin(angle) ** 2, self._limit, near)


def _may_be_deeper(value: FloatArray, higher: FloatArray, least: float) -> BoolArray:
    """Whether a convex valley may go below ``least``: not below the lines through its neighbours."""
    return np.asarray(2 * value - higher < (1 - _CLOSE) * least)

"""Where outcomes stop being rare, in the plane of both error rates."""

from __future__ import annotations

import math

import numpy as np

from dpaudit.stats._binomial import Region
from dpaudit.stats._search import last_positive
from dpaudit.stats._types import FloatArray
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["Boundary"]

_CLOSE = 1e-5  # relative, on the parameter
_HUGE = 1e300  # in the place of infinity
_ZOOMS, _FINE = 3, 7  # closer looks at every valley, and their places


class Boundary:
    """For every fpr the fnr at which the outcomes have probability ``limit``; ``near`` is a guess of one.

    The curve of a larger parameter has a smaller fnr, at which the outcomes are more probable. So they are
    rare at every fpr for the parameters below those of all points of the boundary.
    """

    def __init__(self, region: Region, limit: float, tradeoff: TradeOff, near: float) -> None:
        self._region, self._limit, self._tradeoff = region, limit, tradeoff
        self._near = near  # the point found last

    def least_parameter(self, angles: FloatArray) -> float:
        """The least parameter on the boundary; the fpr is the squared sine of an angle."""
        angles, fnr = self._with_bend(angles, self._fnr(angles))
        values = np.minimum(self._tradeoff.parameter(np.sin(angles) ** 2, fnr), _HUGE)
        least = float(values.min())
        if least == 0:
            return least
        padded = np.pad(values, 1, mode="edge")
        lower, higher = np.sort([padded[:-2], padded[2:]], axis=0)
        # a convex valley is no deeper than the lines through its lowest place and its neighbours
        promising = 2 * values - higher < (1 - _CLOSE) * least
        valleys = np.flatnonzero((values <= lower) & promising)
        return min([least, *(self._zoom(angles, fnr, int(valley)) for valley in valleys)])

    def _zoom(self, angles: FloatArray, fnr: FloatArray, valley: int) -> float:
        """The least parameter between the neighbours of a valley, by looks that are closer and closer."""
        least = np.inf
        for _ in range(_ZOOMS):
            self._near = float(fnr[valley])
            ends = angles[[max(valley - 1, 0), min(valley + 1, angles.size - 1)]]
            angles = np.linspace(ends[0], ends[1], _FINE)
            fnr = self._fnr(angles)
            values = self._tradeoff.parameter(np.sin(angles) ** 2, fnr)
            valley = int(values.argmin())
            least = min(least, float(values[valley]))
            if values.max() < (1 + _CLOSE) * least:
                break
        return least

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

    def _fnr(self, angles: FloatArray) -> FloatArray:
        found = []
        for fpr in (np.sin(angles) ** 2).tolist():
            fnr = self._region.fnr(fpr, self._limit, self._near)
            self._near = fnr if 0 < fnr < 1 else self._near
            found.append(fnr)
        return np.asarray(found)

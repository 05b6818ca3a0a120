"""The maximum of many (eps, delta) lines, found among a few of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpaudit.stats._types import FloatArray
from dpaudit.stats.tradeoffs._approximate import approximate_fnr

__all__ = ["Lines"]

_NEIGHBOURS = np.array([[-1], [0], [1]])  # of the line that should be the highest: rounding may err by one


@dataclass(frozen=True, eq=False)
class Lines:
    """What ``PiecewiseLinear`` is at parameter 1, for those who ask in many places.

    Both lines of a guarantee, 1 - delta - e^eps fpr and its mirror image, are the highest between the
    places where their neighbours cross them. So the highest line is looked up, and the others are not
    computed.
    """

    _epsilons: FloatArray
    _deltas: FloatArray
    _steep_ends: FloatArray  # rates, ascending, at which the next steep line of fewer epsilon is the highest
    _flat_ends: FloatArray  # and the next flat line of more epsilon

    @classmethod
    def of(cls, epsilons: FloatArray, deltas: FloatArray) -> Lines:
        """From guarantees in any order."""
        points = np.asarray(_hull(epsilons, deltas))
        eps, dels = points[:, 0], points[:, 1]
        with np.errstate(over="ignore"):  # epsilons that hardly differ cross nowhere
            risen = -np.diff(dels) / np.expm1(np.diff(eps))  # e^eps fpr where two neighbours cross
        return cls(eps, dels, (np.exp(-eps[:-1]) * risen)[::-1], 1 - dels[:-1] - risen)

    def fnr(self, fpr: FloatArray) -> FloatArray:
        """The highest line at each rate, 0 where all are below."""
        last = self._epsilons.size - 1
        steep = last - np.searchsorted(self._steep_ends, fpr)
        flat = np.searchsorted(self._flat_ends, fpr)
        near = np.clip(np.concatenate([place[None] + _NEIGHBOURS for place in (steep, flat)]), 0, last)
        highest: FloatArray = approximate_fnr(self._epsilons[near], self._deltas[near], fpr).max(axis=0)
        return highest


def _hull(epsilons: FloatArray, deltas: FloatArray) -> list[tuple[float, float]]:
    """The guarantees on the lower convex hull over e^eps: no other is the highest line anywhere."""
    order = np.lexsort((deltas, epsilons))
    points: list[tuple[float, float]] = []
    for point in zip(epsilons[order].tolist(), deltas[order].tolist(), strict=True):
        if points and point[1] >= points[-1][1]:  # more epsilon and no less delta
            continue
        while len(points) > 1 and _is_above(points[-1], points[-2], point):
            points.pop()
        points.append(point)
    return points


def _is_above(middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether a point is on or above the chord of two others, with e^eps on the horizontal axis."""
    # (e^middle - e^left) / (e^right - e^left) without overflow
    share = math.exp(middle[0] - right[0]) * math.expm1(left[0] - middle[0]) / math.expm1(left[0] - right[0])
    return middle[1] - left[1] >= (right[1] - left[1]) * share

"""The guarantees that matter among many."""

from __future__ import annotations

import math

import numpy as np

from dpaudit.stats._types import FloatArray

__all__ = ["lower_hull"]

_Point = tuple[float, float]


def lower_hull(epsilons: FloatArray, deltas: FloatArray) -> FloatArray:
    """The (eps, delta) on the lower convex hull over e^eps, a row each, in order: no other says more.

    >>> lower_hull(np.array([2.0, 0.0, 1.0]), np.array([0.0, 0.3, 0.29]))
    array([[0. , 0.3],
           [2. , 0. ]])
    """
    order = np.lexsort((deltas, epsilons))
    points: list[_Point] = []
    for point in zip(epsilons[order].tolist(), deltas[order].tolist(), strict=True):
        if points and point[1] >= points[-1][1]:  # delta never grows with epsilon
            continue
        while len(points) > 1 and _is_above(points[-2], points[-1], point):
            points.pop()
        points.append(point)
    return np.asarray(points)


def _is_above(left: _Point, middle: _Point, right: _Point) -> bool:
    """Whether a point is on or above the chord of its neighbours, with e^eps on the horizontal axis."""
    # (e^middle - e^left) / (e^right - e^left) without overflow
    share = math.exp(middle[0] - right[0]) * math.expm1(left[0] - middle[0]) / math.expm1(left[0] - right[0])
    return middle[1] - left[1] >= (right[1] - left[1]) * share

"""Cubic interpolation between four equally spaced values, with an estimate of its error."""

from __future__ import annotations

import numpy as np

from dpaudit.stats._types import FloatArray

__all__ = ["cubic"]


def cubic(values: FloatArray, at: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The polynomial through the four values (or rows) at 0, 1, 2, 3, and how far it may be off.

    It is off by less than it differs from the parabolas through three of the four, as long as a step of
    the lattice is small against the bends of the function.
    """
    best = _lagrange(values, at, range(4))
    parabolas = [_lagrange(values, at, nodes) for nodes in (range(3), range(1, 4))]
    return best, np.maximum(*(np.abs(best - other) for other in parabolas))


def _lagrange(values: FloatArray, at: FloatArray, nodes: range) -> FloatArray:
    total = np.zeros_like(at)
    for i in nodes:
        others = [j for j in nodes if j != i]
        total += values[i] * np.prod([(at - j) / (i - j) for j in others], axis=0)
    return total

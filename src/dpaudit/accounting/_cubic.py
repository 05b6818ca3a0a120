"""Cubic interpolation between four equally spaced values."""

from __future__ import annotations

import numpy as np

from dpaudit.stats._types import FloatArray

__all__ = ["cubic"]


def cubic(values: FloatArray, at: FloatArray) -> FloatArray:
    """Lagrange's polynomial through the four values (or rows) at 0, 1, 2, 3."""
    total = np.zeros_like(at)
    for i in range(4):
        others = [j for j in range(4) if j != i]
        total += values[i] * np.prod([(at - j) / (i - j) for j in others], axis=0)
    return total

"""Tests of signs: exact for independent noise of any scale, which need not be the same everywhere.

Noise that is as often positive as negative has signs that are fair coins, however much of it there is in
each coordinate and step. So noise that is larger than claimed in some places, which leaks nothing, looks no
different from noise of one size.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from dpaudit.stats._types import ArrayLike, FloatArray

__all__ = ["correlation", "same_signs", "sure_signs", "swaying"]


def sure_signs(noise: FloatArray, resolution: float) -> FloatArray:
    """1 or -1; and 0 where a rounding by ``resolution`` may have turned the sign."""
    return np.subtract(noise > resolution, noise < -resolution, dtype=np.float64)


def same_signs(agreeing: ArrayLike, differing: ArrayLike, count: ArrayLike) -> FloatArray:
    """How likely so many of ``count`` pairs of signs are to agree, or to differ.

    Pairs that are neither may be either: the p-value is the largest over all that they may be.
    """
    most, number = np.maximum(agreeing, differing), np.asarray(count, dtype=np.float64)
    return np.asarray(np.minimum(1.0, 2 * stats.binom.sf(most - 1, number, 0.5)), dtype=np.float64)


def correlation(agreeing: ArrayLike, differing: ArrayLike) -> FloatArray:
    """That of two normal numbers whose signs agree as often (Sheppard 1899); 0 if there are none."""
    agree, differ = (np.asarray(value, dtype=np.float64) for value in (agreeing, differing))
    return np.sin(math.pi / 2 * (agree - differ) / np.maximum(agree + differ, 1.0))


def swaying(energy: float, count: int) -> float:
    """How likely sums of signs are to sway so much: an upper bound, for sums of any length.

    ``energy`` is the sum of ``count`` squared sums, each over the number of its signs. The moments of
    exp(slope x square) are below those of a squared normal number: Chernoff's bound is that of a chi-square.
    """
    share = energy / count
    return math.exp(-count / 2 * (share - 1 - math.log(share))) if share > 1 else 1.0

"""Drawing without putting back: what Poisson sampling is, once the sizes of its batches are given."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from dpaudit.stats._types import FloatArray, IntArray

__all__ = ["at_least", "far_from_mean", "hypergeometric"]

_WIDTH = 40  # standard deviations, beyond which nothing is left that a double could hold
_STEEPEST = 30.0


def hypergeometric(total: int, marked: int, drawn: int) -> tuple[IntArray, FloatArray]:
    """How many of those drawn are marked: the numbers that are possible, and the chance of each."""
    lowest, highest = max(0, drawn + marked - total), min(drawn, marked)
    mean = drawn * marked / total
    spread = math.sqrt(mean * (total - marked) / total) + 1
    low = max(lowest, math.floor(mean - _WIDTH * spread))
    high = min(highest, math.ceil(mean + _WIDTH * spread))
    values = np.arange(low, high + 1)
    logs = _log_choose(marked, values) + _log_choose(total - marked, drawn - values)
    chances = np.exp(logs - logs.max())
    likely = chances > 0
    return values[likely], chances[likely] / chances.sum()


def at_least(total: int, marked: int, drawn: int, seen: int) -> float:
    """How likely it is that so many of those drawn are marked, or more."""
    values, chances = hypergeometric(total, marked, drawn)
    return float(chances[values >= seen].sum())


def far_from_mean(log_mgf: Callable[[FloatArray], FloatArray], seen: float, variance: float) -> float:
    """How likely a sum is to be so far up, or so far down, at most (Chernoff 1952).

    ``log_mgf`` is the logarithm of the mean of exp(slope x sum). Sums of counts take few values: an exact
    p-value would need coins to break ties, and this bound needs none.
    """
    if variance <= 0:
        return 1.0
    slopes = np.geomspace(min(0.05 / math.sqrt(variance), 1.0), _STEEPEST, 80)
    lowest = min(float((log_mgf(slope) - slope * seen).min()) for slope in (slopes, -slopes))
    return min(1.0, 2 * math.exp(min(lowest, 0.0)))


def _log_choose(number: int, chosen: IntArray) -> FloatArray:
    value: FloatArray = (
        special.gammaln(number + 1) - special.gammaln(chosen + 1) - special.gammaln(number - chosen + 1)
    )
    return value

"""Drawing without putting back: what Poisson sampling is, once the sizes of its batches are given."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpaudit.stats._types import ArrayLike, FloatArray, IntArray

__all__ = ["at_least", "places"]

_WIDTH = 40  # standard deviations, beyond which nothing is left that a double could hold


def places(total: int, marked: ArrayLike, drawn: ArrayLike, seen: ArrayLike, coins: FloatArray) -> FloatArray:
    """Where the number of marked things among those drawn lies in its distribution, from 0 to 1.

    Ties are broken by ``coins``, so that the places are uniform and independent, exactly.
    """
    triples = np.stack([np.asarray(x, dtype=np.int64) for x in (marked, drawn, seen)], axis=1)
    kinds, which = np.unique(triples, axis=0, return_inverse=True)
    below, at = np.empty(len(kinds)), np.empty(len(kinds))
    for row, (with_mark, number, count) in enumerate(kinds.tolist()):
        values, chances = _distribution(total, with_mark, number)
        below[row] = chances[values < count].sum()
        at[row] = chances[values == count].sum()
    which = which.ravel()
    return below[which] + coins * at[which]


def at_least(total: int, marked: int, drawn: int, seen: int) -> float:
    """How likely it is that so many marked things are drawn, or more."""
    values, chances = _distribution(total, marked, drawn)
    return float(chances[values >= seen].sum())


def _distribution(total: int, marked: int, drawn: int) -> tuple[IntArray, FloatArray]:
    """The hypergeometric distribution, where it is not zero."""
    lowest, highest = max(0, drawn + marked - total), min(drawn, marked)
    mean = drawn * marked / total
    spread = math.sqrt(mean * (total - marked) / total) + 1
    low = max(lowest, math.floor(mean - _WIDTH * spread))
    high = min(highest, math.ceil(mean + _WIDTH * spread))
    values = np.arange(low, high + 1)
    logs = _log_choose(marked, values) + _log_choose(total - marked, drawn - values)
    chances = np.exp(logs - logs.max())
    return values, chances / chances.sum()


def _log_choose(number: int, chosen: IntArray) -> FloatArray:
    value: FloatArray = (
        special.gammaln(number + 1) - special.gammaln(chosen + 1) - special.gammaln(number - chosen + 1)
    )
    return value

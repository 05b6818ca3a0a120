"""Two binomial counts: exact ends, exact probabilities."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

from dpaudit.stats._types import FloatArray, IntArray

__all__ = ["Region", "binomial_cdf", "binomial_pmf", "plausible_rate", "upper_rate", "window"]

_TABLE = 1 << 20  # up to here the log-factorials of a sample size are kept
_DEVIATIONS = 8.0  # how far a sum over counts reaches: it leaves out less than 1e-14


def upper_rate(errors: IntArray, trials: int, error: float) -> FloatArray:
    """The rate that ``errors`` of ``trials`` rule out at level ``error``; 1 if all were errors."""
    errors = np.asarray(errors)
    upper = special.betaincinv(errors + 1.0, np.maximum(trials - errors, 1.0), 1 - error)
    return np.where(errors >= trials, 1.0, upper)


def plausible_rate(errors: int, trials: int, error: float) -> tuple[float, float]:
    """Clopper and Pearson's two-sided interval."""
    low = 1 - float(upper_rate(np.asarray(trials - errors), trials, error / 2))
    return max(low, 0.0), float(upper_rate(np.asarray(errors), trials, error / 2))


def binomial_cdf(successes: FloatArray, trials: int, rate: float | FloatArray) -> FloatArray:
    """P(Binomial <= successes), 0 below 0 and 1 from ``trials`` on."""
    inside = np.clip(successes, 0, trials - 1)
    value = special.betaincc(inside + 1.0, trials - inside, rate)
    return np.where(successes < 0, 0.0, np.where(successes >= trials, 1.0, value))


def window(trials: int, low: float, high: float) -> IntArray:
    """The counts that matter for a rate between ``low`` and ``high``."""
    ends = []
    for rate, sign in ((low, -1), (high, 1)):
        reach = _DEVIATIONS * (math.sqrt(trials * rate * (1 - rate)) + _DEVIATIONS)
        ends.append(min(max(int(trials * rate + sign * reach), 0), trials))
    return np.arange(ends[0], ends[1] + 1)


def binomial_pmf(trials: int, rate: float) -> tuple[int, FloatArray]:
    """The first count that matters, and the probabilities from there on."""
    rate = min(max(rate, 1e-300), 1 - 1e-16)
    counts = window(trials, rate, rate)
    logs = _log_choose(trials, int(counts[0]), int(counts[-1]) + 1)
    return int(counts[0]), np.exp(logs + counts * math.log(rate) + (trials - counts) * math.log1p(-rate))


def _log_choose(trials: int, start: int, stop: int) -> FloatArray:
    if trials <= _TABLE:
        factorials = _log_factorials(trials)
        return np.asarray(factorials[-1] - factorials[start:stop] - factorials[::-1][start:stop])
    counts = np.arange(start, stop)
    return -special.betaln(counts + 1.0, trials - counts + 1.0) - math.log(trials + 1)


@lru_cache(maxsize=8)
def _log_factorials(trials: int) -> FloatArray:
    return special.gammaln(np.arange(trials + 1) + 1.0)


class Region:
    """Outcomes with at most ``most_fn`` false negatives, a limit for each number of false positives."""

    def __init__(self, fp: IntArray, most_fn: FloatArray, sizes: tuple[int, int]) -> None:
        self._absent, self._present = sizes
        self._first = int(fp[0])
        self._most_fn = most_fn.astype(np.int64)

    def probability(self, fpr: float, fnr: float) -> float:
        """How probable these outcomes are under the two rates."""
        first, fp_pmf = binomial_pmf(self._absent, fpr)
        low = max(first, self._first)
        high = min(first + fp_pmf.size, self._first + self._most_fn.size)
        limits = self._most_fn[low - self._first : max(high, low) - self._first]
        start, fn_pmf = binomial_pmf(self._present, fnr)
        # one running sum serves all limits
        cdf = np.concatenate([[0.0], np.cumsum(fn_pmf)])
        below = cdf[np.clip(limits - start + 1, 0, fn_pmf.size)]
        return float(fp_pmf[low - first : max(high, low) - first] @ below)

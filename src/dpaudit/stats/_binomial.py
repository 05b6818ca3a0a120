"""Exact confidence limits and probabilities for two binomial counts."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray
from dpaudit.stats.rootfinding import falling_root

_DEVIATIONS = 8.0  # how far sums over counts extend: they omit less than 1e-14


def upper_rate(errors: IntArray, trials: int, error: float) -> FloatArray:
    """Return the upper confidence limit of the rate of ``errors`` in ``trials``; 1 if all are errors."""
    errors = np.asarray(errors)
    upper = special.betaincinv(errors + 1.0, np.maximum(trials - errors, 1.0), 1 - error)
    return np.where(errors >= trials, 1.0, upper)


def upper_rate_chords(errors: IntArray, trials: int, error: float) -> FloatArray:
    """Return a lower bound on :func:`upper_rate`, within 1e-5 of it: a hundred times cheaper for many counts.

    The upper limit is concave in the number of errors, so its chords lie below it.
    """
    knots, rates = _knots(trials, error)
    return np.interp(errors, knots, rates)


@lru_cache(maxsize=16)
def _knots(trials: int, error: float) -> tuple[FloatArray, FloatArray]:
    """Return every count up to 256, then counts 2 % apart, mirrored from the other end, with their rates."""
    apart = np.geomspace(256, max(trials / 2, 256), 2 + int(50 * math.log(max(trials / 512, 1))))
    half = np.minimum(np.concatenate([np.arange(256), apart.astype(np.int64)]), trials)
    knots = np.union1d(half, trials - half)
    return knots.astype(np.float64), upper_rate(knots, trials, error)


def plausible_rate(errors: int, trials: int, error: float) -> tuple[float, float]:
    """Return the two-sided Clopper-Pearson interval."""
    low = 1 - float(upper_rate(np.asarray(trials - errors), trials, error / 2))
    return max(low, 0.0), float(upper_rate(np.asarray(errors), trials, error / 2))


def binomial_cdf(successes: FloatArray, trials: int, rate: float | FloatArray) -> FloatArray:
    """Return P(Binomial <= successes): 0 below 0 and 1 from ``trials`` on."""
    inside = np.clip(successes, 0, trials - 1)
    value = special.betaincc(inside + 1.0, trials - inside, rate)
    return np.where(successes < 0, 0.0, np.where(successes >= trials, 1.0, value))


def plausible_counts(trials: int, low: float, high: float) -> IntArray:
    """Return the counts with non-negligible probability for a rate between ``low`` and ``high``."""
    ends = []
    for rate, sign in ((low, -1), (high, 1)):
        half_width = _DEVIATIONS * (math.sqrt(trials * rate * (1 - rate)) + _DEVIATIONS)
        ends.append(min(max(int(trials * rate + sign * half_width), 0), trials))
    return np.arange(ends[0], ends[1] + 1)


@lru_cache(maxsize=128)
def binomial_pmf(trials: int, rate: float) -> tuple[int, FloatArray]:
    """Return the first count with non-negligible probability, and the probabilities from there on."""
    rate = min(max(rate, 1e-300), 1 - 1e-16)
    counts = plausible_counts(trials, rate, rate)
    logs = _log_choose(trials, int(counts[0]), int(counts[-1]) + 1)
    other = math.log1p(-rate)
    pmf = np.exp(logs + counts * (math.log(rate) - other) + trials * other)
    pmf.flags.writeable = False  # the cache returns the same array again
    return int(counts[0]), pmf


def _log_choose(trials: int, start: int, stop: int) -> FloatArray:
    # larger tables are not cached
    if trials <= (1 << 20):
        return _log_choose_table(trials)[start:stop]
    # one log-beta, then ratios of neighbors: much cheaper than one log-beta per count
    counts = np.arange(start, stop - 1)
    first = -float(special.betaln(start + 1.0, trials - start + 1.0)) - math.log(trials + 1)
    return first + np.concatenate([[0.0], np.cumsum(np.log((trials - counts) / (counts + 1)))])


@lru_cache(maxsize=8)
def _log_choose_table(trials: int) -> FloatArray:
    factorials = special.gammaln(np.arange(trials + 1) + 1.0)
    return np.asarray(factorials[-1] - factorials - factorials[::-1])


class Region:
    """Outcomes with at most ``most_fn`` false negatives, one limit per number of false positives."""

    def __init__(self, fp: IntArray, most_fn: FloatArray | IntArray, sizes: tuple[int, int]) -> None:
        self._absent, self._present = sizes
        self._first = int(fp[0])
        self._most_fn = most_fn.astype(np.int64)

    def probability(self, fpr: float, fnr: float) -> float:
        """Return the probability of these outcomes under the two rates."""
        weights, limits = self._conditional(fpr)
        return _dot(weights, self._at_most(limits, fnr)[0])

    def fnr(self, fpr: float, probability: float, near: float) -> float:
        """Return the fnr at which the outcomes have this probability at this fpr; 0 or 1 if none exists.

        ``near`` is an initial guess. On the probit scale the probability is nearly linear.
        """
        weights, limits = self._conditional(fpr)
        if weights[limits >= 0].sum() <= probability:
            return 0.0
        if weights[limits >= self._present].sum() >= probability:
            return 1.0
        target = float(special.ndtri(probability))

        def excess(probit: float) -> tuple[float, float]:
            rate = float(special.ndtr(probit))
            below, density = self._at_most(limits, rate)
            height = float(special.ndtri(min(max(_dot(weights, below), 1e-300), 1 - 1e-16)))
            slope = -_dot(weights, density) / (1 - rate) * math.exp((height**2 - probit**2) / 2)
            return height - target, slope

        close = 0.01 / math.sqrt(self._present)  # a hundredth of a standard deviation
        return float(special.ndtr(falling_root(excess, float(special.ndtri(near)), -37.0, 8.0, close)))

    def _conditional(self, fpr: float) -> tuple[FloatArray, IntArray]:
        """Return the non-negligible probabilities of false positive counts, and the limit at each count."""
        first, weights = binomial_pmf(self._absent, fpr)
        low = max(first, self._first)
        high = max(min(first + weights.size, self._first + self._most_fn.size), low)
        return weights[low - first : high - first], self._most_fn[low - self._first : high - self._first]

    def _at_most(self, limits: IntArray, fnr: float) -> tuple[FloatArray, FloatArray]:
        """Return P(false negatives <= limit) for every limit, and -(1 - fnr) times its derivative in fnr."""
        start, pmf = binomial_pmf(self._present, fnr)
        indices = np.minimum(np.maximum(limits - (start - 1), 0), pmf.size + 1)
        padded = np.zeros(pmf.size + 2)
        padded[1:-1] = pmf
        # one running sum serves all limits
        return np.cumsum(padded)[indices], padded[indices] * (self._present - limits)


def _dot(weights: FloatArray, values: FloatArray) -> float:
    # not np.dot: on a busy machine, BLAS threads wait for each other
    return float((weights * values).sum())

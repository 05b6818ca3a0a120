"""Inference methods of earlier papers, for any trade-off, and the exact binomial limits behind them.

Clopper-Pearson bounds each rate separately; the joint posterior of both rates follows Zanella-Beguelin et al.
2022 (paper, section 4.2); the interval for a ratio of rates (Katz et al. 1978) is used as in Lu et al. 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray
from dpaudit.errors import InputError
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats.inference._base import BoundQuery, CountInference, Kind, RankInference
from dpaudit.stats.rootfinding import falling_root, last_positive
from dpaudit.stats.tradeoffs import PureDP, TradeOff
from dpaudit.stats.tradeoffs._families import at_least_zero

_DEVIATIONS = 8.0  # how far sums over counts extend: they omit less than 1e-14
_ASYMPTOTIC = "there are many of them (the interval is asymptotic)"


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


@dataclass(frozen=True)
class ClopperPearson(RankInference):
    """Upper Clopper-Pearson limits of both error rates, each at half the error, applied to the trade-off."""

    rank_is_bound: ClassVar[bool] = True
    allows_unequal_rates: ClassVar[bool] = True

    def rank(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        fpr = upper_rate(false_positives, sizes.num_absent, query.error_rate / 2)
        fnr = upper_rate(false_negatives, sizes.num_present, query.error_rate / 2)
        return query.tradeoff.parameter(fpr, fnr)

    def limit(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        fpr = upper_rate_chords(false_positives, sizes.num_absent, query.error_rate / 2)
        fnr = upper_rate_chords(false_negatives, sizes.num_present, query.error_rate / 2)
        return query.tradeoff.parameter(fpr, fnr)

    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], query: BoundQuery
    ) -> Region:
        fp = plausible_counts(sizes.num_absent, *fpr)
        most_fn = self.most_refuting(fp, claimed, sizes, query)
        return Region(fp, most_fn, (sizes.num_absent, sizes.num_present))

    def most_refuting(
        self, ranks: IntArray, claimed: float, sizes: ErrorCounts, query: BoundQuery
    ) -> IntArray:
        upper = upper_rate(ranks, sizes.num_absent, query.error_rate / 2)
        allowed = query.tradeoff.fnr(claimed, upper)
        return most_below(allowed, sizes.num_present, query.error_rate / 2)

    def at_rank(self, counts: ErrorCounts, query: BoundQuery, floor: float) -> float:
        return max(self.parameter(counts, query), floor)  # the limit of a count is that of a rank


def most_below(rates: FloatArray, trials: int, error: float) -> IntArray:
    """Return the largest number of errors whose upper limit is below each rate, -1 if none."""
    errors = plausible_counts(trials, float(rates.min()), float(rates.max()))
    ends = upper_rate_chords(errors, trials, error)
    return np.asarray(errors[0] + np.searchsorted(ends, rates, side="left") - 1)


@dataclass(frozen=True)
class Posterior(CountInference):
    """The largest parameter whose region of error rates has posterior probability at most half the error.

    Both rates have Jeffreys priors. The bound is credible, not a confidence bound: it reports some leak for
    any data.
    """

    kind: ClassVar[Kind] = Kind.CREDIBLE

    def parameter(self, counts: ErrorCounts, query: BoundQuery) -> float:
        # a typical bound without a leak, in case the rank is 0
        least = 0.05 / math.sqrt(min(counts.num_absent, counts.num_present))
        guess = max(super().parameter(counts, query), least)
        mass = _RegionMass(counts, query.tradeoff)
        return last_positive(lambda p: query.error_rate / 2 - mass(p), guess, tolerance=1e-6)

    def rank(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        return jeffreys_rank(false_positives, false_negatives, sizes, query.tradeoff, query.error_rate / 2)


class _RegionMass:
    """Posterior probability of {f(fpr) <= fnr <= 1 - f(1 - fpr)}, as an integral over one rate.

    In quantile space the outer rate has density one, so Gauss-Legendre nodes need no additional weights,
    and an infinite density (no errors at all) causes no loss of accuracy. The region is symmetric, so either
    rate may be the outer one; the one with the narrower posterior makes the integrand smooth.
    """

    def __init__(self, counts: ErrorCounts, tradeoff: TradeOff) -> None:
        outer = (counts.false_positives, counts.num_absent)
        inner = (counts.false_negatives, counts.num_present)
        if probit_variance(*outer) > probit_variance(*inner):
            outer, inner = inner, outer
        nodes, self._weights = _quantile_nodes()
        self._tradeoff = tradeoff
        self._outer = special.betaincinv(outer[0] + 0.5, outer[1] - outer[0] + 0.5, nodes)
        self._outer_rest = special.betaincinv(outer[1] - outer[0] + 0.5, outer[0] + 0.5, 1 - nodes)
        self._inner = (inner[0] + 0.5, inner[1] - inner[0] + 0.5)

    def __call__(self, parameter: float) -> float:
        low = self._tradeoff.fnr(parameter, self._outer)
        high = self._tradeoff.fnr(parameter, self._outer_rest)  # upper end: 1 - fnr
        a, b = self._inner
        inside = 1 - special.betainc(a, b, low) - special.betainc(b, a, high)
        return float(self._weights @ np.maximum(inside, 0.0))


def probit_variance(errors: int, trials: int) -> float:
    """Return the approximate variance of the probit of an observed rate, with half an error added."""
    rate = (errors + 0.5) / (trials + 1)
    height = math.exp(-(float(special.ndtri(rate)) ** 2) / 2)
    return rate * (1 - rate) / (trials * height**2)


@lru_cache(maxsize=1)
def _quantile_nodes() -> tuple[FloatArray, FloatArray]:
    nodes, weights = np.polynomial.legendre.leggauss(200)
    return (nodes + 1) / 2, weights / 2


@dataclass(frozen=True)
class KatzLog(CountInference):
    """A normal interval for ln(tpr / fpr) and ln(tnr / fnr): asymptotic, for pure epsilon-DP only.

    A count of zero is replaced by one half, since the interval would be infinite otherwise.
    """

    kind: ClassVar[Kind] = Kind.HEURISTIC

    rank_is_bound: ClassVar[bool] = True

    def _require_pure(self, query: BoundQuery) -> None:
        if not isinstance(query.tradeoff, PureDP):
            raise InputError(
                f"KatzLog() needs tradeoff=PureDP(), got {query.tradeoff!r}: only pure epsilon-DP limits "
                "the ratio of error rates."
            )
        if query.delta > 0:
            raise InputError(
                f"delta must be 0 with KatzLog(), got {query.delta:g}: (eps, delta)-DP does not limit the "
                "ratio of error rates."
            )

    def assumption(self, observations: Observations | ErrorCounts, *, is_fixed: bool) -> str:
        text = super().assumption(observations, is_fixed=is_fixed)
        return f"{text}; {_ASYMPTOTIC}"

    def rank(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        self._require_pure(query)
        z = float(-special.ndtri(query.error_rate / 2))
        absent, present = sizes.num_absent, sizes.num_present
        forward = _log_ratio(present - false_negatives, present, false_positives, absent, z)
        backward = _log_ratio(absent - false_positives, absent, false_negatives, present, z)
        return at_least_zero(np.maximum(forward, backward))

    def limit(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        # Below (z / 2)^2 errors, one more raises the bound: the interval narrows faster than the ratio falls.
        turn = math.ceil(float(special.ndtri(query.error_rate / 2)) ** 2 / 4)
        best = self.rank(false_positives, false_negatives, sizes, query)
        for least in range(1, turn + 2):
            more_fp, more_fn = (np.maximum(n, least) for n in (false_positives, false_negatives))
            best = np.maximum(best, self.rank(more_fp, false_negatives, sizes, query))
            best = np.maximum(best, self.rank(false_positives, more_fn, sizes, query))
        return best


def _log_ratio(hits: IntArray, of: int, misses: IntArray, among: int, z: float) -> FloatArray:
    top, bottom = (np.maximum(n, 0.5) for n in (hits, misses))
    spread = np.sqrt(np.maximum(1 / top - 1 / of, 0) + np.maximum(1 / bottom - 1 / among, 0))
    return np.asarray(np.log(top / of) - np.log(bottom / among) - z * spread)


def jeffreys_rank(
    false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, tradeoff: TradeOff, error: float
) -> FloatArray:
    """Return the parameter at the upper limits of both Jeffreys intervals, each at z / sqrt(2) deviations.

    Two rates that are each off by z / sqrt(2) deviations are jointly off by z.
    """
    level = float(special.ndtr(-special.ndtri(error) / math.sqrt(2)))
    fpr, fnr = (
        np.asarray(special.betaincinv(errors + 0.5, trials - errors + 0.5, level), np.float64)
        for errors, trials in ((false_positives, sizes.num_absent), (false_negatives, sizes.num_present))
    )
    return tradeoff.parameter(fpr, fnr)

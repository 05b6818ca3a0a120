"""Exact inference on both error rates jointly.

A parameter is refuted if outcomes as extreme as the observed one are improbable at every point of its curve.
The boundary of the improbable region is traced in the plane of the two rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats.inference._base import BoundQuery, RankInference
from dpaudit.stats.inference._classical import (
    Region,
    binomial_cdf,
    jeffreys_rank,
    most_below,
    plausible_counts,
    probit_variance,
    upper_rate,
    upper_rate_chords,
)
from dpaudit.stats.rootfinding import first_true_integer, last_positive
from dpaudit.stats.tradeoffs import TradeOff

_GRID = 15  # angles in the initial search for the least favorable rates
_ALL_KNOTS = 512  # false positives below which nothing is interpolated


@dataclass(frozen=True)
class JointExact(RankInference):
    """An exact joint test: refuted are parameters at which outcomes this extreme have P <= error everywhere.

    Outcomes are ordered by the Gaussian plug-in estimate, which is valid for every family, as is any fixed
    order. Rates above their upper limits are excluded, at an error of s / 2 each with s = min(0.001, error /
    50), and s is added to the probability (Berger and Boos 1994). Fewer errors lower both limits, so they
    never lower the bound, and exchanging the two sides does not change it.
    """

    def parameter(self, counts: ErrorCounts, query: BoundQuery) -> float:
        outcome = _Outcome.wider_side_first(counts)
        first, second = outcome.upper_rates(_interval_error(query) / 2)
        lowest = outcome.exchanged().boundary(second, second, query).rate_at(second, first)
        if lowest >= first:
            return float(query.tradeoff.parameter(np.asarray(first), np.asarray(second)))
        boundary = outcome.boundary(lowest, first, query)
        return boundary.least_parameter(_angles((lowest, first), outcome.grid_size(lowest, first)), second)

    def rank(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        return jeffreys_rank(false_positives, false_negatives, sizes, query.tradeoff, query.error_rate)

    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], query: BoundQuery
    ) -> Region:
        trials = (sizes.num_absent, sizes.num_present)
        fp = plausible_counts(sizes.num_absent, *fpr)
        return Region(fp, _claimed_curve(claimed, trials, query).most_refuting(fp, fpr), trials)

    def at_rank(self, counts: ErrorCounts, query: BoundQuery, floor: float) -> float:
        test = RankTest(counts.false_positives, counts, query)

        def margin(parameter: float) -> float:
            return test.margin(parameter, counts.false_negatives)

        if margin(floor) <= 0:
            return floor
        return max(last_positive(margin, max(2 * floor, 0.1), tolerance=1e-6), floor)

    def most_refuting(
        self, ranks: IntArray, claimed: float, sizes: ErrorCounts, query: BoundQuery
    ) -> IntArray:
        return np.asarray([_most_refuting(int(rank), claimed, sizes, query) for rank in ranks])


@dataclass(frozen=True)
class _Outcome:
    """The errors of two sides and the number of trials of each; which side is absent does not matter."""

    errors: tuple[int, int]
    trials: tuple[int, int]

    @classmethod
    def wider_side_first(cls, counts: ErrorCounts) -> _Outcome:
        """Return an outcome whose first side has the larger standard error of the probit of its rate.

        The boundary, traced along this side, is then only a few of its standard errors long.
        """
        outcome = cls(
            (counts.false_positives, counts.false_negatives), (counts.num_absent, counts.num_present)
        )
        variances = [probit_variance(*side) for side in zip(outcome.errors, outcome.trials, strict=True)]
        return outcome if variances[0] >= variances[1] else outcome.exchanged()

    def exchanged(self) -> _Outcome:
        return _Outcome(self.errors[::-1], self.trials[::-1])

    def upper_rates(self, error: float) -> tuple[float, float]:
        """Return the upper confidence limits of both rates, each at this error."""
        first, second = (
            float(upper_rate(np.asarray(errors), trials, error))
            for errors, trials in zip(self.errors, self.trials, strict=True)
        )
        return first, second

    def boundary(self, low: float, high: float, query: BoundQuery) -> RejectionBoundary:
        """Return the boundary for first rates between ``low`` and ``high``."""
        observed = float(_order(np.asarray(self.errors[0]), np.asarray(self.errors[1]), self.trials))
        counts = plausible_counts(self.trials[0], low, high)
        most = _most_errors(_probits(counts, self.trials[0]), observed, self.trials[1])
        region = Region(counts, most, self.trials)
        return RejectionBoundary(region, _limit(query), query.tradeoff)

    def grid_size(self, low: float, high: float) -> int:
        """Return how many angles to evaluate between ``low`` and ``high``.

        Half a standard error apart is close enough unless the second side is much larger: the boundary is
        then a staircase with one step per count of the first.
        """
        rates = [(errors + 0.5) / (n + 1) for errors, n in zip(self.errors, self.trials, strict=True)]
        heights = [math.exp(-(float(special.ndtri(rate)) ** 2) / 2) for rate in rates]
        one_count = 1 / (self.trials[0] * heights[0])
        smoothing = math.sqrt(rates[1] * (1 - rates[1]) / self.trials[1]) / heights[1]
        if smoothing > 0.7 * one_count:
            return _GRID
        # four angles per count, where counts of the larger group cannot smooth those of the smaller one
        return max(_GRID, math.ceil(4 * (high - low) * self.trials[0]))


def _order(first: IntArray, second: IntArray, trials: tuple[int, int]) -> FloatArray:
    """Return the order of outcomes: mu of the observed rates, with half an error added to each side."""
    return -_probits(first, trials[0]) - _probits(second, trials[1])


def _probits(errors: IntArray, trials: int) -> FloatArray:
    return np.asarray(special.ndtri((errors + 0.5) / (trials + 1)))


def _most_errors(probits: FloatArray, observed: float | FloatArray, trials: int) -> FloatArray:
    """Return the largest second counts that rank at least as high as ``observed``, for first ones."""
    return np.floor((trials + 1) * special.ndtr(-probits - observed + 1e-10) - 0.5 + 1e-9)


def _interval_error(query: BoundQuery) -> float:
    """Return the error spent on the upper limits of both rates."""
    return min(1e-3, query.error_rate / 50)


def _limit(query: BoundQuery) -> float:
    """Return the largest probability at the least favorable rates at which an outcome still refutes."""
    # a thousandth of the limit is reserved for what the search may miss
    return (query.error_rate - _interval_error(query)) * (1 - 1e-3)


def _angles(interval: tuple[float, float], size: int) -> FloatArray:
    """Return evenly spaced angles arcsin(sqrt(rate)), so that rates are even in standard deviations."""
    low, high = np.arcsin(np.sqrt(interval))
    return np.linspace(low, high, size)


class RejectionBoundary:
    """For each first rate, the second one at which the outcomes have probability ``limit``.

    The curve of a larger parameter has a smaller second rate, at which the outcomes are more probable. Hence
    they are improbable on the whole curve of every parameter below the smallest one on the boundary.
    """

    def __init__(self, region: Region, limit: float, tradeoff: TradeOff) -> None:
        self._region, self._limit, self._tradeoff = region, limit, tradeoff

    def least_parameter(self, angles: FloatArray, near: float) -> float:
        """Return the smallest parameter on the boundary; the first rate is the squared sine of an angle.

        ``near`` is an initial guess of the second rate at the first angle.
        """
        angles, second = self._with_bend(angles, self._along(angles, near))
        values = self._parameters(angles, second)
        least = float(values.min())
        if least == 0:
            return least
        padded = np.pad(values, 1, mode="edge")
        lower, higher = np.sort([padded[:-2], padded[2:]], axis=0)
        valleys = np.flatnonzero((values <= lower) & _may_be_deeper(values, higher, least))
        return min([least, *(self._valley_minimum(angles, second, int(valley)) for valley in valleys)])

    def rate_at(self, first: float, near: float) -> float:
        """Return the second rate on the boundary, 0 or 1 if none is; ``near`` is an initial guess."""
        return self._region.fnr(first, self._limit, min(max(near, 1e-300), 1 - 1e-16))

    def _valley_minimum(self, angles: FloatArray, second: FloatArray, valley: int) -> float:
        """Return the smallest parameter between the neighbors of a valley, by repeated halving."""
        for _ in range(6):
            around = slice(max(valley - 1, 0), valley + 2)
            angles, second = self._with_midpoints(angles[around], second[around])
            values = self._parameters(angles, second)
            valley = int(values.argmin())
            higher = values[max(valley - 1, 0) : valley + 2].max()
            if not _may_be_deeper(values[valley], higher, values[valley]):
                break
        return float(values[valley])

    def _with_midpoints(self, angles: FloatArray, second: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the boundary with midpoints added."""
        between = (angles[:-1] + angles[1:]) / 2
        near = (second[:-1] + second[1:]) / 2
        parameters = [
            self.rate_at(math.sin(angle) ** 2, guess) for angle, guess in zip(between, near, strict=True)
        ]
        indices = np.arange(1, angles.size)
        return np.insert(angles, indices, between), np.insert(second, indices, parameters)

    def _parameters(self, angles: FloatArray, second: FloatArray) -> FloatArray:
        # 1e300 stands for infinity
        return np.minimum(self._tradeoff.parameter(np.sin(angles) ** 2, second), 1e300)

    def _with_bend(self, angles: FloatArray, second: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Add the point where both rates are equal, at which a curve may bend."""

        def margin(rate: float) -> float:
            return self._region.probability(rate, rate) - self._limit

        rate = min(last_positive(margin, 0.1, tolerance=1e-6) * (1 + 1e-6), 0.5)
        bend = math.asin(math.sqrt(rate))
        index = int(np.searchsorted(angles, bend))
        if not 0 < index < angles.size:
            return angles, second
        return np.insert(angles, index, bend), np.insert(second, index, rate)

    def _along(self, angles: FloatArray, near: float) -> FloatArray:
        """Return the boundary at each angle; two points give an initial guess for the next."""
        rates: list[float] = []
        for angle in angles:
            rates.append(self.rate_at(math.sin(angle) ** 2, near))
            if 0 < rates[-1] < 1:
                near = rates[-1]
                if len(rates) > 1 and rates[-2] > 0:
                    near *= min(rates[-1] / rates[-2], 1.0)
        return np.asarray(rates)


@lru_cache(maxsize=4)
def _claimed_curve(claimed: float, trials: tuple[int, int], query: BoundQuery) -> ClaimedCurve:
    """Return the same curve again for a search over leaks, which asks for neighboring parts of it."""
    return ClaimedCurve(claimed, trials, query)


class ClaimedCurve:
    """Points of the claimed curve, each with the lowest order of outcomes that are improbable there.

    An outcome refutes the claim if it ranks at least that high at every point whose rates are below the
    outcome's upper limits. Points are a quarter of a standard error apart (more for over a million trials,
    where the order is smooth); points at the upper limits of few errors are added, because the range of an
    outcome ends there.
    """

    def __init__(self, claimed: float, trials: tuple[int, int], query: BoundQuery) -> None:
        self._claimed, self._trials, self._family = claimed, trials, query.tradeoff
        self._error = _interval_error(query) / 2
        self._target = float(special.ndtri(_limit(query)))
        self._top = float(_order(np.asarray(0), np.asarray(0), trials)) + 1
        self._grid = self._all_points()
        self._orders: dict[int, float] = {}

    def most_refuting(self, fp: IntArray, fpr: tuple[float, float]) -> FloatArray:
        """Return the largest number of false negatives with which the claim is refuted, -1 if none.

        It is accurate for counts that are plausible for rates in ``fpr``. Of many counts, most are
        interpolated: the power needs them to a fraction of their standard deviation.
        """
        knots = self._knots(fp)
        upper = upper_rate_chords(knots, self._trials[0], self._error)
        numbers = self._numbers(fpr)
        excluded = most_below(self._grid[1, numbers], self._trials[1], self._error)
        firsts = np.searchsorted(upper, self._grid[0, numbers])  # knots to which a point applies
        firsts[0] = 0
        probits = _probits(knots, self._trials[0])
        most = np.full(knots.size, np.inf)
        for number, least, first in zip(numbers, excluded, firsts, strict=True):
            refuting = _most_errors(probits[first:], self._order(number), self._trials[1])
            np.minimum(most[first:], np.maximum(refuting, least), out=most[first:])
        return most if knots.size == fp.size else np.floor(np.interp(fp, knots, most))

    def _knots(self, fp: IntArray) -> IntArray:
        """Return all small counts, and others at distances of a fraction of their standard errors."""
        few, trials = int(np.searchsorted(fp, _ALL_KNOTS)), self._trials[0]
        if few == fp.size:
            return fp
        low, high = (math.asin(math.sqrt(int(count) / trials)) for count in (fp[few], fp[-1]))
        # knots are an eighth of a standard error apart
        size = 2 + int((high - low) * 2 * math.sqrt(trials) / 0.125)
        places = np.searchsorted(fp, np.sin(np.linspace(low, high, size)) ** 2 * trials)
        knots = np.union1d(np.arange(few), np.append(places.clip(max=fp.size - 1), fp.size - 1))
        return np.asarray(fp[knots])

    def _all_points(self) -> FloatArray:
        """Return the fpr (increasing) and fnr of all points; the smaller rate of each is exact."""
        middle = math.asin(math.sqrt(self._family.balanced_error(self._claimed)))
        # with more trials, the order hardly changes between neighboring points
        count = min(*self._trials, 1_000_000)
        # angles of the curve are a quarter of a standard error apart
        size = 2 + int(middle * max(math.sqrt(count) / 0.125, 100))
        regular = np.sin(np.linspace(0, middle, size)) ** 2
        # the upper limits of few errors are points of the claimed curve
        few = np.arange(40)
        fpr, fnr = (
            np.union1d(regular, limits[limits < regular[-1]])
            for limits in (upper_rate(few[few <= n], n, self._error) for n in self._trials)
        )
        # from the smallest fpr to equal rates, and on to the smallest fnr
        ends = self._family.fnr(self._claimed, fpr), self._family.fnr(self._claimed, fnr[:-1])
        return np.stack([np.append(fpr, ends[1][::-1]), np.append(ends[0], fnr[:-1][::-1])])

    def _numbers(self, fpr: tuple[float, float]) -> IntArray:
        """Return the points that matter, up to the upper limits of the most errors that are plausible."""
        most_fp = round(fpr[1] * self._trials[0])
        most_fn = round(float(self._family.fnr(self._claimed, np.asarray(fpr[0]))) * self._trials[1])
        highest = _Outcome((most_fp, most_fn), self._trials).upper_rates(self._error)
        first = int(np.searchsorted(-self._grid[1], -highest[1]))
        last = int(np.searchsorted(self._grid[0], highest[0], side="right"))
        return np.arange(min(max(first - 1, 0), last), last)

    def _order(self, number: int) -> float:
        if number not in self._orders:
            near = self._orders.get(number - 1, 0.0)
            fpr, fnr = self._grid[:, number].tolist()
            self._orders[number] = self._lowest_improbable((fpr, fnr), near)
        return self._orders[number]

    def _lowest_improbable(self, rates: tuple[float, float], near: float) -> float:
        fp = plausible_counts(self._trials[0], rates[0], rates[0])
        probits = _probits(fp, self._trials[0])

        # the search is over the distance from the top of the order, which is refuted
        def margin(below: float) -> float:
            most = _most_errors(probits, self._top - below, self._trials[1])
            region = Region(fp, most, self._trials)
            probability = min(max(region.probability(*rates), 1e-300), 1 - 1e-16)
            return self._target - float(special.ndtri(probability))

        return self._top - last_positive(margin, self._top - near, tolerance=1e-5)


def _may_be_deeper(value: FloatArray, higher: FloatArray, least: float) -> BoolArray:
    """Return whether a convex valley may go below ``least``: it stays above the lines through neighbors."""
    return np.asarray(2 * value - higher < (1 - 1e-5) * least)


class RankTest:
    """The exact test at an absent score of a fixed rank, where no rate is unknown.

    The fpr is at most a Beta variable, whatever the distribution of the scores, and given the absent scores,
    the false negatives are binomial. P(as few false negatives) is summed over cells of the fpr, with its
    largest value in each, because it increases with the fpr.
    """

    def __init__(self, rank: int, sizes: ErrorCounts, query: BoundQuery) -> None:
        self._present = sizes.num_present
        self._tradeoff, self._error = query.tradeoff, query.error_rate
        self._fpr, self._weights, self._beyond = _fpr_cells(rank, sizes.num_absent, query.error_rate)

    def margin(self, parameter: float, misses: int) -> float:
        """Return a number that is positive if this many false negatives refute the parameter."""
        return self._margin(self._tradeoff.fnr(parameter, self._fpr), misses)

    def most_refuting(self, parameter: float) -> int:
        """Return the most false negatives that refute the parameter, -1 if none do."""
        fnr = self._tradeoff.fnr(parameter, self._fpr)
        first = first_true_integer(lambda misses: self._margin(fnr, misses) <= 0, 0, self._present)
        return -1 + (self._present + 1 if first is None else first)

    def _margin(self, fnr: FloatArray, misses: int) -> float:
        as_few = binomial_cdf(np.asarray(misses), self._present, fnr)
        probability = float((self._weights * as_few).sum()) + self._beyond
        return float(special.ndtri(self._error) - special.ndtri(min(probability, 1 - 1e-16)))


@lru_cache(maxsize=128)
def _fpr_cells(rank: int, num_absent: int, error: float) -> tuple[FloatArray, FloatArray, float]:
    """Return the largest fpr in each cell, the probability of the cell, and that of all larger fpr."""
    tails = np.geomspace(1.0, error / 1000, 128 + 1)  # P(the fpr is larger)
    fpr = 1 - special.betaincinv(num_absent - rank, rank + 1.0, tails[1:])
    return fpr, tails[:-1] - tails[1:], float(tails[-1])


@lru_cache(maxsize=256)
def _most_refuting(rank: int, claimed: float, sizes: ErrorCounts, query: BoundQuery) -> int:
    """Return the same number again for a search over leaks."""
    return RankTest(rank, sizes, query).most_refuting(claimed)

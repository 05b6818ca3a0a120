"""Exact inference on both error rates jointly.

A parameter is refuted if outcomes as extreme as the observed one are improbable at every point of its curve.
The boundary of the improbable region is traced in the plane of the two rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.stats._binomial import Region, plausible_counts, plausible_rate
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._rootfinding import last_positive
from dpaudit.stats.inference._base import BoundQuery, ExactInference
from dpaudit.stats.inference._classical import jeffreys_rank
from dpaudit.stats.tradeoffs import TradeOff

_CLOSE = 1e-5  # relative tolerance of the parameter
_HUGE = 1e300  # stands for infinity
_HALVINGS = 6  # how often the distance between two angles may be halved
_GRID = 15  # angles in the initial search for the least favorable fpr
_ALLOWANCE = 1e-3  # fraction of the limit reserved for what the search may miss


@dataclass(frozen=True)
class JointExact(ExactInference):
    """An exact joint test: a parameter is refuted if outcomes this extreme have P <= error at every fpr.

    Outcomes are ordered by the Gaussian plug-in estimate, which is valid for every family, as is any fixed
    order. The least favorable fpr is searched for in an interval that contains it with probability
    1 - 1e-3, and 1e-3 is added to the probability (Berger and Boos 1994).
    """

    def parameter(self, counts: ErrorCounts, query: BoundQuery) -> float:
        fp, fn = np.asarray(counts.false_positives), np.asarray(counts.false_negatives)
        observed = float(_order(fp, fn, counts))
        interval = plausible_rate(counts.false_positives, counts.num_absent, _interval_error(query))
        return _largest_refuted(observed, counts, interval, query)

    def rank(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        return jeffreys_rank(false_positives, false_negatives, sizes, query.tradeoff, query.error_rate)

    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], query: BoundQuery
    ) -> Region:
        fp = plausible_counts(sizes.num_absent, *fpr)
        curve = _curve_points(claimed, fpr, query)
        limit = float(special.ndtri(_limit(query)))

        def region(observed: float) -> Region:
            most_fn = _most_false_negatives(fp, observed, sizes)
            return Region(fp, most_fn, (sizes.num_absent, sizes.num_present))

        # the search is over the distance from the top of the order: it needs the refuted side at small values
        none = np.asarray(0)
        top = float(_order(none, none, sizes)) + 1

        def margin(below: float) -> float:
            outcomes = region(top - below)
            largest = max(outcomes.probability(*rates) for rates in curve)
            return limit - float(special.ndtri(min(max(largest, 1e-300), 1 - 1e-16)))

        return region(top - last_positive(margin, max(top - claimed, 1.0), tolerance=1e-6))


def _order(fp: IntArray, fn: IntArray, sizes: ErrorCounts) -> FloatArray:
    """Return the order of outcomes: mu of the observed rates, with half an error added to each side."""
    return -special.ndtri((fp + 0.5) / (sizes.num_absent + 1)) - special.ndtri(
        (fn + 0.5) / (sizes.num_present + 1)
    )


def _most_false_negatives(fp: IntArray, observed: float, sizes: ErrorCounts) -> FloatArray:
    """Return, for each fp, the largest fn that ranks at least as high as ``observed``."""
    rest = -special.ndtri((fp + 0.5) / (sizes.num_absent + 1)) - observed
    return np.floor((sizes.num_present + 1) * special.ndtr(rest + 1e-10) - 0.5 + 1e-9)


def _interval_error(query: BoundQuery) -> float:
    """Return the error spent on the confidence interval of the fpr."""
    return min(1e-3, query.error_rate / 50)


def _limit(query: BoundQuery) -> float:
    """Return the largest probability at the least favorable fpr at which an outcome still refutes."""
    return (query.error_rate - _interval_error(query)) * (1 - _ALLOWANCE)


def _angles(interval: tuple[float, float], size: int) -> FloatArray:
    """Return evenly spaced angles arcsin(sqrt(rate)), so that rates are even in standard deviations."""
    low, high = np.arcsin(np.sqrt(interval))
    return np.linspace(low, high, size)


def _curve_points(claimed: float, fpr: tuple[float, float], query: BoundQuery) -> list[tuple[float, float]]:
    """Return points of the claimed curve, including those where it may bend."""
    family = query.tradeoff
    bend = min(max(family.balanced_error(claimed), fpr[0]), fpr[1])
    rates = np.append(np.sin(_angles(fpr, 2 * _GRID)) ** 2, bend)
    return list(zip(rates.tolist(), family.fnr(claimed, rates).tolist(), strict=True))


def _largest_refuted(
    observed: float, sizes: ErrorCounts, interval: tuple[float, float], query: BoundQuery
) -> float:
    """Return the largest parameter at which outcomes as high as ``observed`` are improbable at every fpr."""
    fp = plausible_counts(sizes.num_absent, *interval)
    region = Region(fp, _most_false_negatives(fp, observed, sizes), (sizes.num_absent, sizes.num_present))
    angles = _angles(interval, _GRID)
    middle = float(special.ndtr(-special.ndtri(np.sin(angles[_GRID // 2]) ** 2) - observed))
    return RejectionBoundary(region, _limit(query), query.tradeoff, middle).least_parameter(angles)


class RejectionBoundary:
    """For each fpr, the fnr at which the outcomes have probability ``limit``; ``near`` is an initial guess.

    The curve of a larger parameter has a smaller fnr, at which the outcomes are more probable. Hence they
    are improbable at every fpr for all parameters below the smallest one on the boundary.
    """

    def __init__(self, region: Region, limit: float, tradeoff: TradeOff, near: float) -> None:
        self._region, self._limit, self._tradeoff, self._near = region, limit, tradeoff, near

    def least_parameter(self, angles: FloatArray) -> float:
        """Return the smallest parameter on the boundary; the fpr is the squared sine of an angle."""
        angles, fnr = self._with_bend(angles, self._along(angles))
        values = self._parameters(angles, fnr)
        least = float(values.min())
        if least == 0:
            return least
        padded = np.pad(values, 1, mode="edge")
        lower, higher = np.sort([padded[:-2], padded[2:]], axis=0)
        valleys = np.flatnonzero((values <= lower) & _may_be_deeper(values, higher, least))
        return min([least, *(self._valley_minimum(angles, fnr, int(valley)) for valley in valleys)])

    def _valley_minimum(self, angles: FloatArray, fnr: FloatArray, valley: int) -> float:
        """Return the smallest parameter between the neighbors of a valley, by repeated halving."""
        for _ in range(_HALVINGS):
            around = slice(max(valley - 1, 0), valley + 2)
            angles, fnr = self._with_midpoints(angles[around], fnr[around])
            values = self._parameters(angles, fnr)
            valley = int(values.argmin())
            higher = values[max(valley - 1, 0) : valley + 2].max()
            if not _may_be_deeper(values[valley], higher, values[valley]):
                break
        return float(values[valley])

    def _with_midpoints(self, angles: FloatArray, fnr: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the boundary with midpoints added."""
        between = (angles[:-1] + angles[1:]) / 2
        near = (fnr[:-1] + fnr[1:]) / 2
        found = [self._fnr(angle, guess) for angle, guess in zip(between, near, strict=True)]
        indices = np.arange(1, angles.size)
        return np.insert(angles, indices, between), np.insert(fnr, indices, found)

    def _parameters(self, angles: FloatArray, fnr: FloatArray) -> FloatArray:
        return np.minimum(self._tradeoff.parameter(np.sin(angles) ** 2, fnr), _HUGE)

    def _with_bend(self, angles: FloatArray, fnr: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Add the point where both rates are equal, at which a curve may bend."""

        def margin(rate: float) -> float:
            return self._region.probability(rate, rate) - self._limit

        rate = min(last_positive(margin, 0.1, tolerance=1e-6) * (1 + 1e-6), 0.5)
        bend = math.asin(math.sqrt(rate))
        index = int(np.searchsorted(angles, bend))
        if not 0 < index < angles.size:
            return angles, fnr
        return np.insert(angles, index, bend), np.insert(fnr, index, rate)

    def _along(self, angles: FloatArray) -> FloatArray:
        """Return the boundary at each angle; two points give an initial guess for the next."""
        found: list[float] = []
        near = self._near
        for angle in angles:
            found.append(self._fnr(angle, near))
            if 0 < found[-1] < 1:
                near = found[-1]
                if len(found) > 1 and found[-2] > 0:
                    near *= min(found[-1] / found[-2], 1.0)
        return np.asarray(found)

    def _fnr(self, angle: float, near: float) -> float:
        return self._region.fnr(math.sin(angle) ** 2, self._limit, near)


def _may_be_deeper(value: FloatArray, higher: FloatArray, least: float) -> BoolArray:
    """Return whether a convex valley may go below ``least``: it stays above the lines through neighbors."""
    return np.asarray(2 * value - higher < (1 - _CLOSE) * least)

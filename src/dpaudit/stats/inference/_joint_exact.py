"""Exact inference on both rates jointly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit.stats._binomial import Region, plausible_rate, window
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._question import Question
from dpaudit.stats._search import last_positive
from dpaudit.stats._types import FloatArray, IntArray
from dpaudit.stats.inference._base import ExactInference

__all__ = ["JointExact"]

_GRID = 9  # places of the first look for the least favourable fpr
_GOLDEN = (3 - math.sqrt(5)) / 2


@dataclass(frozen=True)
class JointExact(ExactInference):
    """Refutes a parameter if an outcome as extreme as this has probability <= error at every fpr.

    Outcomes are ordered by the Gaussian plug-in, which is valid for every family: any fixed order is.
    The least favourable fpr is searched in an interval that holds it with probability 1 - 1e-3, and
    1e-3 is added to the probability (Berger and Boos 1994).
    """

    def parameter(self, counts: ErrorCounts, question: Question) -> float:
        observed = float(
            _order(np.asarray(counts.false_positives), np.asarray(counts.false_negatives), counts)
        )
        spent = _spent(question)
        interval = plausible_rate(counts.false_positives, counts.num_absent, spent)
        least = _LeastFavourable(observed, counts, interval, question, question.error - spent)
        if least.margin(1e-9) <= 0:
            return 0.0
        return last_positive(least.margin, _guess(counts, question), tolerance=1e-5)

    def rank(
        self,
        false_positives: IntArray,
        false_negatives: IntArray,
        sizes: ErrorCounts,
        question: Question,
    ) -> FloatArray:
        del question  # the bound grows with the order, whatever the family
        return _order(false_positives, false_negatives, sizes)

    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], question: Question
    ) -> Region:
        limit = question.error - _spent(question)

        def refuted(height: float) -> float:
            observed = 10 - height  # the search wants what is refuted on its left
            return _LeastFavourable(observed, sizes, fpr, question, limit).margin(claimed)

        lowest = 10 - last_positive(refuted, 10 - max(claimed, 0.1), tolerance=1e-6)
        fp = window(sizes.num_absent, *fpr)
        return Region(fp, _most_false_negatives(fp, lowest, sizes), (sizes.num_absent, sizes.num_present))


def _order(fp: IntArray, fn: IntArray, sizes: ErrorCounts) -> FloatArray:
    """The order of outcomes: mu of the observed rates, half an error added to each side."""
    return -special.ndtri((fp + 0.5) / (sizes.num_absent + 1)) - special.ndtri(
        (fn + 0.5) / (sizes.num_present + 1)
    )


def _most_false_negatives(fp: IntArray, observed: float, sizes: ErrorCounts) -> FloatArray:
    """For each fp the largest fn that still orders at least as high as ``observed``."""
    rest = -special.ndtri((fp + 0.5) / (sizes.num_absent + 1)) - observed
    return np.floor((sizes.num_present + 1) * special.ndtr(rest + 1e-10) - 0.5 + 1e-9)


def _spent(question: Question) -> float:
    """The error spent on the interval of the fpr."""
    return min(1e-3, question.error / 50)


def _guess(counts: ErrorCounts, question: Question) -> float:
    """Both rates raised by z / sqrt(2) deviations: where the answer will be, nearly."""
    z = -float(special.ndtri(question.error)) / math.sqrt(2)
    raised = []
    for errors, trials in (
        (counts.false_positives, counts.num_absent),
        (counts.false_negatives, counts.num_present),
    ):
        rate = (errors + 0.5) / (trials + 1)
        raised.append(np.asarray(min(rate + z * math.sqrt(rate * (1 - rate) / trials), 1.0)))
    return float(question.tradeoff.parameter(raised[0], raised[1]))


class _LeastFavourable:
    """The largest probability, over an interval of fpr, of outcomes ordered at least ``observed``."""

    def __init__(
        self,
        observed: float,
        sizes: ErrorCounts,
        interval: tuple[float, float],
        question: Question,
        limit: float,
    ) -> None:
        fp = window(sizes.num_absent, *interval)
        most_fn = _most_false_negatives(fp, observed, sizes)
        self._region = Region(fp, most_fn, (sizes.num_absent, sizes.num_present))
        # evenly spaced in the arcsine of the root, that is, in standard deviations
        low, high = np.arcsin(np.sqrt(interval))
        self._angles = np.linspace(low, high, _GRID)
        self._close = (high - low) / 400  # a hundredth of a standard deviation
        self._tradeoff, self._limit = question.tradeoff, limit

    def margin(self, parameter: float) -> float:
        """Positive where the parameter is refuted; nearly linear, being on the probit scale."""
        largest = min(max(self._largest(parameter), 1e-300), 1 - 1e-16)
        return float(special.ndtri(self._limit) - special.ndtri(largest))

    def _largest(self, parameter: float) -> float:
        values = self._probability(self._angles, parameter)
        best = int(values.argmax())
        low, high = self._angles[[max(best - 1, 0), min(best + 1, _GRID - 1)]]
        inner = [low + _GOLDEN * (high - low), high - _GOLDEN * (high - low)]
        heights = [float(v) for v in self._probability(np.asarray(inner), parameter)]
        largest = max(float(values[best]), *heights)
        # golden section around the best place, unless the answer is clear already
        while self._limit / 2 < largest <= self._limit and high - low > self._close:
            if heights[0] > heights[1]:
                high, inner[1], heights[1], new = inner[1], inner[0], heights[0], 0
                inner[0] = low + _GOLDEN * (high - low)
            else:
                low, inner[0], heights[0], new = inner[0], inner[1], heights[1], 1
                inner[1] = high - _GOLDEN * (high - low)
            heights[new] = float(self._probability(np.asarray([inner[new]]), parameter)[0])
            largest = max(largest, heights[new])
        return largest

    def _probability(self, angles: FloatArray, parameter: float) -> FloatArray:
        fpr = np.sin(angles) ** 2
        fnr = self._tradeoff.fnr(parameter, fpr)
        pairs = zip(fpr.tolist(), fnr.tolist(), strict=True)
        return np.asarray([self._region.probability(p, r) for p, r in pairs])

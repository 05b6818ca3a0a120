"""Exact inference on both rates jointly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit.stats._binomial import Region, plausible_rate, window
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._question import Question
from dpaudit.stats._search import last_positive
from dpaudit.stats._types import FloatArray, IntArray
from dpaudit.stats.inference._base import ExactInference
from dpaudit.stats.inference._boundary import Boundary
from dpaudit.stats.inference._surrogate import surrogate

__all__ = ["JointExact"]

_GRID = 15  # places of the first look for the least favourable fpr
_ALLOWANCE = 1e-3  # of the limit, for what the search may miss


@dataclass(frozen=True)
class JointExact(ExactInference):
    """Refutes a parameter if an outcome as extreme as this has probability <= error at every fpr.

    Outcomes are ordered by the Gaussian plug-in, which is valid for every family: any fixed order is.
    The least favourable fpr is searched in an interval that holds it with probability 1 - 1e-3, and
    1e-3 is added to the probability (Berger and Boos 1994).
    """

    def parameter(self, counts: ErrorCounts, question: Question) -> float:
        fp, fn = np.asarray(counts.false_positives), np.asarray(counts.false_negatives)
        observed = float(_order(fp, fn, counts))
        interval = plausible_rate(counts.false_positives, counts.num_absent, _spent(question))
        return _least_parameter(observed, counts, interval, question)

    def rank(
        self,
        false_positives: IntArray,
        false_negatives: IntArray,
        sizes: ErrorCounts,
        question: Question,
    ) -> FloatArray:
        return surrogate(false_positives, false_negatives, sizes, question.tradeoff, question.error)

    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], question: Question
    ) -> Region:
        fp = window(sizes.num_absent, *fpr)
        curve = _places(claimed, fpr, question)
        limit = float(special.ndtri(_limit(question)))

        def region(observed: float) -> Region:
            most_fn = _most_false_negatives(fp, observed, sizes)
            return Region(fp, most_fn, (sizes.num_absent, sizes.num_present))

        # how far below the top of the order an outcome may be: the search wants the refuted on its left
        none = np.asarray(0)
        top = float(_order(none, none, sizes)) + 1

        def margin(below: float) -> float:
            outcomes = region(top - below)
            largest = max(outcomes.probability(*rates) for rates in curve)
            return limit - float(special.ndtri(min(max(largest, 1e-300), 1 - 1e-16)))

        return region(top - last_positive(margin, max(top - claimed, 1.0), tolerance=1e-6))


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


def _limit(question: Question) -> float:
    """How probable an outcome may be at the worst fpr and still refute."""
    return (question.error - _spent(question)) * (1 - _ALLOWANCE)


def _angles(interval: tuple[float, float], size: int) -> FloatArray:
    """Places in an interval of rates, even in the arcsine of the root: in standard deviations."""
    low, high = np.arcsin(np.sqrt(interval))
    return np.linspace(low, high, size)


def _places(claimed: float, fpr: tuple[float, float], question: Question) -> list[tuple[float, float]]:
    """Points of the claimed curve, those where it may bend among them."""
    family = question.tradeoff
    bend = min(max(family.balanced_error(claimed), fpr[0]), fpr[1])
    rates = np.append(np.sin(_angles(fpr, 2 * _GRID)) ** 2, bend)
    return list(zip(rates.tolist(), family.fnr(claimed, rates).tolist(), strict=True))


def _least_parameter(
    observed: float, sizes: ErrorCounts, interval: tuple[float, float], question: Question
) -> float:
    """The largest parameter at which outcomes ordered at least ``observed`` are too rare at every fpr."""
    fp = window(sizes.num_absent, *interval)
    region = Region(fp, _most_false_negatives(fp, observed, sizes), (sizes.num_absent, sizes.num_present))
    angles = _angles(interval, _GRID)
    middle = float(special.ndtr(-special.ndtri(np.sin(angles[_GRID // 2]) ** 2) - observed))
    return Boundary(region, _limit(question), question.tradeoff, middle).least_parameter(angles)

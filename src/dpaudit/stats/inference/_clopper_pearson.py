"""Clopper and Pearson's exact interval for each rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpaudit.stats._binomial import Region, upper_rate, upper_rate_chords, window
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._question import Question
from dpaudit.stats._types import FloatArray, IntArray
from dpaudit.stats.inference._base import ExactInference

__all__ = ["ClopperPearson"]


@dataclass(frozen=True)
class ClopperPearson(ExactInference):
    """Upper ends of both error rates at half the error each, plugged into the trade-off."""

    rank_is_bound: ClassVar[bool] = True

    def rank(
        self,
        false_positives: IntArray,
        false_negatives: IntArray,
        sizes: ErrorCounts,
        question: Question,
    ) -> FloatArray:
        fpr = upper_rate(false_positives, sizes.num_absent, question.error / 2)
        fnr = upper_rate(false_negatives, sizes.num_present, question.error / 2)
        return question.tradeoff.parameter(fpr, fnr)

    def limit(
        self,
        false_positives: IntArray,
        false_negatives: IntArray,
        sizes: ErrorCounts,
        question: Question,
    ) -> FloatArray:
        fpr = upper_rate_chords(false_positives, sizes.num_absent, question.error / 2)
        fnr = upper_rate_chords(false_negatives, sizes.num_present, question.error / 2)
        return question.tradeoff.parameter(fpr, fnr)

    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], question: Question
    ) -> Region:
        fp = window(sizes.num_absent, *fpr)
        upper = upper_rate(fp, sizes.num_absent, question.error / 2)
        allowed = question.tradeoff.fnr(claimed, upper)
        most_fn = _most_below(allowed, sizes.num_present, question.error / 2)
        return Region(fp, most_fn, (sizes.num_absent, sizes.num_present))


def _most_below(rates: FloatArray, trials: int, error: float) -> FloatArray:
    """The most errors whose upper end is below each rate, -1 if none."""
    errors = window(trials, float(rates.min()), float(rates.max()))
    ends = upper_rate_chords(errors, trials, error)
    return np.asarray(errors[0] + np.searchsorted(ends, rates, side="left") - 1.0)

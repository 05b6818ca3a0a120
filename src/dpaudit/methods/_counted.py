"""A fixed threshold whose errors were counted in one pass, for every method that needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.stats import Betting, ErrorCounts, Fixed, Inference, Observations
from dpaudit.stats._chunks import chunks, require_finite
from dpaudit.stats._counts import count
from dpaudit.stats._question import Finding, Question
from dpaudit.stats._steps import StepErrors
from dpaudit.stats._types import IntArray, ScoreArray
from dpaudit.stats.inference import CountInference

__all__ = ["CountedOnce"]


@dataclass(frozen=True, repr=False)
class CountedOnce(Fixed):
    """As :class:`dpaudit.Fixed` on the same observations, which are not read again."""

    counts: ErrorCounts | None = None
    errors: StepErrors | None = None  # where canaries share steps

    @classmethod
    def of(cls, observations: Observations, threshold: float) -> CountedOnce:
        """Go through the scores, piece by piece."""
        rule = Fixed(threshold)
        if observations.with_canary.ndim == 1:
            return cls(rule.threshold, count(observations, rule.threshold))
        errors = _by_step(observations, rule.threshold)
        return cls(rule.threshold, errors.total(), errors)

    def __repr__(self) -> str:
        return repr(Fixed(self.threshold))

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        if isinstance(inference, CountInference) and self.counts is not None:
            return Finding(inference.parameter(self.counts, question), self.threshold, self.counts)
        if isinstance(inference, Betting) and self.errors is not None:
            found = inference.from_errors(self.errors, question)
            return Finding(found, self.threshold, self.errors.total())
        return super().apply(observations, inference, question)


def _by_step(observations: Observations, threshold: float) -> StepErrors:
    absent, present = observations.without_canary, observations.with_canary
    sizes = [np.full(len(side), side.shape[1]) for side in (absent, present)]
    false_positives = _above("without_canary", absent, threshold)
    false_negatives = sizes[1] - _above("with_canary", present, threshold)
    return StepErrors(false_positives, sizes[0], false_negatives, sizes[1], by_coin=False)


def _above(name: str, scores: ScoreArray, threshold: float) -> IntArray:
    """How many scores of each step are above the threshold."""
    num_steps, num_canaries = scores.shape
    above = np.zeros(num_steps, dtype=np.int64)
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        first = start // num_canaries
        places = start + np.flatnonzero(piece > threshold)
        found = np.bincount(places // num_canaries - first)
        above[first : first + found.size] += found
    return above

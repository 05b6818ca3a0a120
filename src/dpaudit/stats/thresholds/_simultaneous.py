"""Bands that hold at many thresholds at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit import _validate
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats._types import IntArray
from dpaudit.stats.inference import ClopperPearson, Inference
from dpaudit.stats.thresholds._base import ThresholdRule, wants
from dpaudit.stats.thresholds._scan import Staircase

__all__ = ["Simultaneous"]


@dataclass(frozen=True)
class Simultaneous(ThresholdRule):
    """The best of thresholds at ranks of the absent scores that are fixed before the data.

    The fpr at an absent score of given rank is a Beta order statistic, whatever the scores'
    distribution. Given the absent scores the thresholds are fixed, so the false negatives at each are
    binomial. Every rank spends its share of the error. Thirty-two ranks cost what a Berk-Jones band over
    all ranks of 1,000 scores would (its local level is about error / 30 there), need no calibration, and
    lose nothing between ranks, because the other side is counted at the very threshold.
    """

    num_thresholds: int = 32

    def __post_init__(self) -> None:
        _validate.whole("num_thresholds", self.num_thresholds)

    def error(self, error: float, num_absent: int) -> float:
        return error / self.ranks(num_absent).size

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        wants(self, inference, ClopperPearson)
        stairs = Staircase.of(observations)
        absent, present = stairs.absent, stairs.present
        ranks = self.ranks(absent.size)
        thresholds = absent[absent.size - 1 - ranks]
        misses = np.searchsorted(present, thresholds, side="right")
        shared = Question(question.tradeoff, question.delta, self.error(question.error, absent.size))
        values = ClopperPearson().rank(ranks, misses, stairs.sizes, shared)
        best = int(values.argmax())
        counts = ErrorCounts(
            # a tie at the threshold may leave fewer above it; the rank is what the band is for
            false_positives=int(ranks[best]),
            num_absent=absent.size,
            false_negatives=int(misses[best]),
            num_present=present.size,
        )
        return Finding(float(values[best]), float(thresholds[best]), counts)

    def ranks(self, size: int) -> IntArray:
        """Numbers of absent scores above the threshold: even in the logit, so dense at both ends."""
        if size <= self.num_thresholds:
            return np.arange(size)
        most = np.log(2.0 * size)
        logits = np.linspace(-most, most, self.num_thresholds)
        shares = 1 / (1 + np.exp(-logits))
        ranks = np.floor(shares * size).astype(np.int64)
        return _distinct(np.minimum(ranks, size - 1), size)


def _distinct(ranks: IntArray, size: int) -> IntArray:
    """Push equal neighbours apart, upwards, then back below ``size``."""
    for i in range(1, ranks.size):
        ranks[i] = max(ranks[i], ranks[i - 1] + 1)
    for i in range(ranks.size - 1, -1, -1):
        ranks[i] = min(ranks[i], size - (ranks.size - i))
    return ranks

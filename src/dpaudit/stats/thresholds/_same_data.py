"""The threshold that looks best on the counted data: the paper's practice, and not a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpaudit.stats._counts import count
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats.inference import CountInference, Inference
from dpaudit.stats.thresholds._base import ThresholdRule, wants
from dpaudit.stats.thresholds._scan import Staircase

__all__ = ["SameData"]


@dataclass(frozen=True)
class SameData(ThresholdRule):
    """The maximum over all thresholds of the counted data. One in three such bounds is too high."""

    valid: ClassVar[bool] = False

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        wants(self, inference, CountInference)
        assert isinstance(inference, CountInference)
        stairs = Staircase.of(observations)
        threshold = float(stairs.absent[stairs.best(inference, question)])
        counts = count(observations, threshold)
        return Finding(inference.parameter(counts, question), threshold, counts)

"""The threshold that looks best on the counted data: the paper's practice, and not a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats.inference import CountInference, Inference
from dpaudit.stats.thresholds._base import ThresholdRule, wants
from dpaudit.stats.thresholds._scan import Staircase

__all__ = ["SameData"]

_OTHERS = 32


@dataclass(frozen=True)
class SameData(ThresholdRule):
    """The maximum over all thresholds of the counted data.

    With the paper's posterior a quarter to a half of such bounds were too high in simulations, and all where
    there was no leak; with Clopper-Pearson up to an eighth.
    """

    valid: ClassVar[bool] = False

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        wants(self, inference, CountInference)
        assert isinstance(inference, CountInference)
        stairs = Staircase.of(observations)
        best = stairs.best(inference, question)
        places = [best]
        if not inference.rank_is_bound:  # a stand-in, which may err in the tails: look at others as well
            others = np.linspace(0, stairs.absent.size - 1, _OTHERS).astype(np.int64)
            places += np.unique(others).tolist()
        findings = [_at(stairs, place, inference, question) for place in places]
        return max(findings, key=lambda finding: finding.parameter)


def _at(stairs: Staircase, place: int, inference: CountInference, question: Question) -> Finding:
    (fp,), (fn,) = stairs.errors(np.asarray([place]))
    counts = replace(stairs.sizes, false_positives=int(fp), false_negatives=int(fn))
    return Finding(inference.parameter(counts, question), float(stairs.absent[place]), counts)

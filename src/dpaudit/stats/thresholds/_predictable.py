"""A threshold for each step, chosen on the steps before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats._steps import Steps
from dpaudit.stats._types import FloatArray
from dpaudit.stats.inference import Betting, Inference
from dpaudit.stats.thresholds._balanced import least_balanced_error
from dpaudit.stats.thresholds._base import ThresholdRule, wants

__all__ = ["Predictable", "predictable_thresholds"]

_GROWTH = 1.3  # choose anew when the past has grown by this factor


@dataclass(frozen=True)
class Predictable(ThresholdRule):
    """With betting: the threshold of a step minimises the balanced error of the steps before it.

    Nothing is bet on the first step, which has no past.
    """

    def counted(self, size: int) -> int:
        return max(size - 1, 1)

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        wants(self, inference, Betting)
        assert isinstance(inference, Betting)
        steps = Steps.of(observations)
        if steps.num_steps < 2:
            raise InputError(f"{self!r} needs at least 2 steps, got {steps.num_steps}.")
        thresholds = predictable_thresholds(steps)
        errors = steps.errors(thresholds)
        return Finding(
            inference.from_errors(errors.after_first(), question),
            float(thresholds[-1]),
            errors.after_first().total(),
        )


def predictable_thresholds(steps: Steps) -> FloatArray:
    """A threshold for every step, from the steps before it; of the first one there is none."""
    thresholds = np.zeros(steps.num_steps)
    step = 1
    while step < steps.num_steps:
        until = max(step + 1, int(step * _GROWTH))
        thresholds[step:until] = least_balanced_error(*steps.before(step))
        step = until
    return thresholds

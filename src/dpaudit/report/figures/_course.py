"""The bound after more and more observations."""

from __future__ import annotations

import numpy as np

from dpaudit.recording import Course
from dpaudit.stats import Observations
from dpaudit.stats._claim import Hypothesis
from dpaudit.stats._steps import StepErrors, Steps
from dpaudit.stats.thresholds._predictable import predictable_thresholds

__all__ = ["course_of"]

_FEWEST = 2


def course_of(
    observations: Observations,
    *,
    hypothesis: Hypothesis,
    threshold: float | None,
    confidence: float,
    horizon: int | None,
) -> Course | None:
    """By bets at a threshold that was fixed; without one, at what the observations before each choose."""
    steps = Steps.of(observations)
    if steps.num_steps < _FEWEST:
        return None
    errors = _errors(steps, threshold)
    shares = errors.balanced()
    return Course.of(
        shares,
        hypothesis=hypothesis,
        confidence=confidence,
        guesses=float((errors.num_absent + errors.num_present).mean()),
        horizon=horizon or shares.size,
    )


def _errors(steps: Steps, threshold: float | None) -> StepErrors:
    if threshold is None:
        return steps.errors(predictable_thresholds(steps)).after_first()
    return steps.errors(np.full(steps.num_steps, threshold))

"""Thresholds chosen before the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats.inference import Inference
from dpaudit.stats.thresholds._base import ThresholdRule
from dpaudit.stats.tradeoffs import Gaussian

__all__ = ["Fixed", "Optimal"]


@dataclass(frozen=True)
class Fixed(ThresholdRule):
    """A threshold chosen before the data; for normalised white-box scores 1/2 is the midpoint."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        _validate.finite("threshold", self.threshold)

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        return inference.at_threshold(observations, self.threshold, question)

    def operating_point(self, question: Question, parameter: float, normalized: bool) -> tuple[float, float]:
        if normalized and isinstance(question.tradeoff, Gaussian):
            return _gaussian_point(self.threshold, parameter)
        return super().operating_point(question, parameter, normalized)


@dataclass(frozen=True)
class Optimal(ThresholdRule):
    """The best threshold for (eps, delta)-DP on normalised scores with this noise (appendix C.1).

    The paper's condition says that epsilon at the threshold's own likelihood ratio is the Gaussian's
    epsilon at delta, so the threshold is 1/2 + noise^2 epsilon.
    """

    noise: float

    def __post_init__(self) -> None:
        _validate.positive("noise", self.noise)

    def threshold(self, delta: float) -> float:
        """The paper's w."""
        if delta == 0:
            raise InputError("Optimal() needs delta > 0, got delta=0: the best threshold is then infinite.")
        return 0.5 + self.noise**2 * Gaussian().epsilon(1 / self.noise, delta)

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        return inference.at_threshold(observations, self.threshold(question.delta), question)

    def operating_point(self, question: Question, parameter: float, normalized: bool) -> tuple[float, float]:
        del normalized  # this rule has no meaning for other scores
        return _gaussian_point(self.threshold(question.delta), parameter)


def _gaussian_point(threshold: float, parameter: float) -> tuple[float, float]:
    """How often N(0, 1 / parameter) is above the threshold and N(1, 1 / parameter) is not."""
    fpr, fnr = special.ndtr(np.asarray([-threshold, threshold - 1]) * parameter)
    return float(fpr), float(fnr)

"""Betting against the claim, step by step (Waudby-Smith and Ramdas 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpaudit import _validate
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Kind, Question
from dpaudit.stats._search import last_positive
from dpaudit.stats._steps import StepErrors, Steps
from dpaudit.stats._types import FloatArray
from dpaudit.stats.inference._base import Inference
from dpaudit.stats.inference._stakes import MOST, stakes

__all__ = ["Betting", "upper_mean"]


@dataclass(frozen=True)
class Betting(Inference):
    """A gambler bets that errors are rarer than the trade-off allows; riches refute it.

    The bet is on the balanced error (fpr + fnr) / 2 of each step, which is lossless at the threshold where
    both rates are equal. Valid at every moment, and when the canaries of one step depend on each other.
    (Bets on the two rates apart would not be: each rate may be low at a time of its own.) ``horizon`` is
    the number of steps that was planned; give it when the run may have been stopped early because of what
    it showed.
    """

    horizon: int | None = None
    kind: ClassVar[Kind] = Kind.CONFIDENCE

    def __post_init__(self) -> None:
        if self.horizon is not None:
            _validate.whole("horizon", self.horizon)

    def assumption(self, stepped: bool) -> str:
        if stepped:
            return "no step's errors are predictable beyond its rates; canaries of a step may depend"
        return "no observation is predictable from those before it"

    def at_threshold(self, observations: Observations, threshold: float, question: Question) -> Finding:
        steps = Steps.of(observations)
        errors = steps.errors(np.full(steps.num_steps, threshold))
        return Finding(self.from_errors(errors, question), threshold, errors.total())

    def from_errors(self, errors: StepErrors, question: Question) -> float:
        """The largest refuted parameter, from the errors of every step in their order."""
        guesses = float((errors.num_absent + errors.num_present).mean())
        upper = upper_mean(errors.balanced(), question.error, guesses, self.horizon)
        return question.tradeoff.from_balanced_error(upper)


def upper_mean(shares: FloatArray, error: float, guesses: float, horizon: int | None = None) -> float:
    """A mean that the shares refute: the wealth of betting on less reached 1/error at some step.

    ``guesses`` is how many guesses a share is made of; it only starts the estimate of their variance.

    >>> upper_mean(np.zeros(500), 0.05, 2) < 0.02
    True
    """
    bets = stakes(shares, error, guesses, horizon or shares.size)
    target = math.log(1 / error)

    def margin(rest: float) -> float:
        mean = 1 - rest
        # 1 + bet (mean - share) stays positive for shares up to 1, and grows with the mean
        capped = np.minimum(bets, MOST / rest)
        return float(np.cumsum(np.log1p(capped * (mean - shares))).max()) - target

    return 1 - min(last_positive(margin, 0.5, tolerance=1e-9), 1.0)

"""Observations seen step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats._types import FloatArray, IntArray, ScoreArray

__all__ = ["StepErrors", "Steps"]


@dataclass(frozen=True)
class Steps:
    """Scores of both sides in the order of their steps.

    One-dimensional observations become min(sizes) steps: the larger side is dealt out evenly, so that
    every score is used.
    """

    absent: ScoreArray
    absent_step: IntArray
    present: ScoreArray
    present_step: IntArray
    num_steps: int
    by_coin: bool

    @classmethod
    def of(cls, observations: Observations) -> Steps:
        """The steps of ``observations``, whatever their shape."""
        observations = observations.in_memory()
        absent, present = observations.without_canary, observations.with_canary
        if observations.with_steps is not None and observations.without_steps is not None:
            steps = observations.without_steps, observations.with_steps
            return cls(absent, steps[0], present, steps[1], observations.num_steps, by_coin=True)
        count = observations.num_steps
        return cls(
            absent.reshape(-1),
            _deal(absent.size, count),
            present.reshape(-1),
            _deal(present.size, count),
            count,
            by_coin=False,
        )

    def before(self, step: int) -> tuple[ScoreArray, ScoreArray]:
        """The absent and present scores of all steps before ``step``."""
        first, second = (int(np.searchsorted(steps, step)) for steps in (self.absent_step, self.present_step))
        return self.absent[:first], self.present[:second]

    def errors(self, threshold: FloatArray) -> StepErrors:
        """Errors of every step at its own threshold."""
        above = self.absent > threshold[self.absent_step]
        below = self.present <= threshold[self.present_step]
        return StepErrors(
            np.bincount(self.absent_step[above], minlength=self.num_steps),
            np.bincount(self.absent_step, minlength=self.num_steps),
            np.bincount(self.present_step[below], minlength=self.num_steps),
            np.bincount(self.present_step, minlength=self.num_steps),
            self.by_coin,
        )


@dataclass(frozen=True)
class StepErrors:
    """Error counts of every step."""

    false_positives: IntArray
    num_absent: IntArray
    false_negatives: IntArray
    num_present: IntArray
    by_coin: bool

    def balanced(self) -> FloatArray:
        """A number in [0, 1] a step, whose mean is (fpr + fnr) / 2.

        Under fair coins that is the share of wrong guesses, whatever the coins showed; for fixed groups
        it is the average of the two shares.
        """
        if self.by_coin:
            wrong = self.false_positives + self.false_negatives
            return wrong / (self.num_absent + self.num_present)
        return (self.false_positives / self.num_absent + self.false_negatives / self.num_present) / 2

    def after_first(self) -> StepErrors:
        """The same without the first step."""
        return StepErrors(
            self.false_positives[1:],
            self.num_absent[1:],
            self.false_negatives[1:],
            self.num_present[1:],
            self.by_coin,
        )

    def total(self) -> ErrorCounts:
        """The counts of all steps together."""
        return ErrorCounts(
            false_positives=int(self.false_positives.sum()),
            num_absent=int(self.num_absent.sum()),
            false_negatives=int(self.false_negatives.sum()),
            num_present=int(self.num_present.sum()),
        )


def _deal(size: int, num_steps: int) -> IntArray:
    """The step of each of ``size`` scores, in order and as even as can be."""
    return np.arange(size) * num_steps // size

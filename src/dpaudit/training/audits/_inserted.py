"""What all audits by gradients share: canaries, chance and the scores of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dpaudit._torch import CanaryVectors
from dpaudit.canaries import Draws, GradientCanary
from dpaudit.stats._types import BoolArray, FloatArray
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._canary_rows import CanaryRows
from dpaudit.training.gradients._flat import trainable

__all__ = ["SECOND_BATCH", "Inserted"]

SECOND_BATCH = 2  # a purpose of chance, besides those of Draws


class Inserted:
    """Canaries in the steps of one training."""

    def __init__(self, training: Training, canary: GradientCanary, num_canaries: int, seed: int) -> None:
        self.num_canaries = num_canaries
        self._canary = canary
        self._size = training.num_parameters
        self._draws = Draws(canary, num_canaries, seed)
        self._norm = training.settings.max_grad_norm
        self._like = next(iter(trainable(training.model).values())).detach()
        self._index = -1
        self._vectors = self._aim(0)

    def chance(self, index: int, purpose: int = 0) -> np.random.Generator:
        """The generator of one step, or of whatever else is counted by ``index``."""
        return self._draws.chance(index, purpose)

    def coins(self, index: int) -> BoolArray:
        """Whether each canary is present: a fair coin each."""
        return self._draws.coins(index)

    def in_data(self) -> BoolArray:
        """Whether each canary is an entry of the data set: a fair coin each."""
        return self._draws.entries()

    def vectors(self, index: int) -> CanaryVectors:
        """Where the canaries of a step point."""
        if self._canary.moving and index != self._index:
            self._index, self._vectors = index, self._aim(index)
        return self._vectors

    def _aim(self, index: int) -> CanaryVectors:
        return CanaryVectors.of(self._draws.directions(index, self._size), self._like)

    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> list[CanaryRows]:
        """The gradients of the canaries with these numbers, not clipped yet."""
        numbers = torch.as_tensor(np.asarray(present, dtype=np.int64), device=self._like.device)
        if len(numbers) == 0:
            return []
        return [CanaryRows(self.vectors(index), numbers, self._canary.scale * self._norm)]

    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        """What the step released along each canary, in clipping norms.

        The adversary knows all other examples. With ``residual`` it takes their sum off: what is left is
        noise, and 1 where the canary is.
        """
        known = step.clipped_sum if residual else None
        released = self.vectors(step.index).project(step.noisy_sum, without=known)
        # numpy is quicker than torch with a few hundred numbers
        scores: FloatArray = released.cpu().numpy().astype(np.float64) / self._norm
        return scores

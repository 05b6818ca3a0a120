"""Gradient canaries: orthogonal directions, known before the training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dpaudit._torch import CanaryVectors
from dpaudit.canaries import Draws, GradientCanary
from dpaudit.stats._types import FloatArray
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._canary_rows import CanaryRows
from dpaudit.training.audits._inserted import Inserted
from dpaudit.training.gradients._flat import trainable

__all__ = ["InsertedGradients"]


class InsertedGradients(Inserted):
    """Gradients of a length that is known; their scores are in clipping norms."""

    def __init__(self, training: Training, canary: GradientCanary, num_canaries: int, seed: int) -> None:
        self._draws = Draws(canary, num_canaries, seed)
        super().__init__(self._draws)
        self._canary = canary
        self._size = training.num_parameters
        self._norm = training.settings.max_grad_norm
        self._like = next(iter(trainable(training.model).values())).detach()
        self._index = -1
        self._vectors = self._aim(0)

    def vectors(self, index: int) -> CanaryVectors:
        """Where the canaries of a step point."""
        if self._canary.moving and index != self._index:
            self._index, self._vectors = index, self._aim(index)
        return self._vectors

    def _aim(self, index: int) -> CanaryVectors:
        return CanaryVectors.of(self._draws.directions(index, self._size), self._like)

    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> list[CanaryRows]:
        numbers = torch.as_tensor(np.asarray(present, dtype=np.int64), device=self._like.device)
        if len(numbers) == 0:
            return []
        return [CanaryRows(self.vectors(index), numbers, self._canary.scale * self._norm)]

    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        known = step.clipped_sum if residual else None
        released = self.vectors(step.index).project(step.noisy_sum, without=known)
        # numpy is quicker than torch with a few hundred numbers
        scores: FloatArray = released.cpu().numpy().astype(np.float64) / self._norm
        return scores

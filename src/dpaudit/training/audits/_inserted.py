"""What all audits by gradients share: canaries, chance and the scores of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dpaudit.canaries import GradientCanary
from dpaudit.stats._types import BoolArray, FloatArray
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._canary_rows import CanaryRows, CanaryVectors
from dpaudit.training.gradients._flat import trainable

__all__ = ["SECOND_BATCH", "Inserted"]

_AUDIT = 0x617564  # what chance of an audit is told apart by, also if the training has the same seed
_COINS, _DIRECTIONS, SECOND_BATCH = 0, 1, 2  # purposes of chance
_AT_ONCE = 64  # steps whose coins are thrown together: a new generator takes longer than the coins of a step


class Inserted:
    """Canaries in the steps of one training.

    Chance is drawn anew from the seed and the step's number: nothing of it has to be kept when a run is
    interrupted.
    """

    def __init__(self, training: Training, canary: GradientCanary, num_canaries: int, seed: int) -> None:
        self.num_canaries = num_canaries
        self._canary = canary
        self._size = training.num_parameters
        self._seed = seed
        self._norm = training.settings.max_grad_norm
        self._like = next(iter(trainable(training.model).values())).detach()
        self._index = -1
        self._thrown: tuple[int, BoolArray] | None = None
        self._vectors = self._aim(0)

    def chance(self, index: int, purpose: int = _COINS) -> np.random.Generator:
        """The generator of one step, or of whatever else is counted by ``index``."""
        # a spawn key: a plain list with zeros at its end would be the training's own seed
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(_AUDIT, purpose, index)))

    def coins(self, index: int) -> BoolArray:
        """Whether each canary is present: a fair coin each."""
        block, place = divmod(index, _AT_ONCE)
        if self._thrown is None or self._thrown[0] != block:
            shape = (_AT_ONCE, self.num_canaries)
            self._thrown = block, self.chance(block).integers(0, 2, shape, dtype=np.bool_)
        coins: BoolArray = self._thrown[1][place]
        return coins

    def vectors(self, index: int) -> CanaryVectors:
        """Where the canaries of a step point."""
        if self._canary.moving and index != self._index:
            self._index, self._vectors = index, self._aim(index)
        return self._vectors

    def _aim(self, index: int) -> CanaryVectors:
        rng = self.chance(index, _DIRECTIONS)
        return CanaryVectors.of(self._canary.directions(self.num_canaries, self._size, rng), self._like)

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
        return (released / self._norm).cpu().double().numpy()

"""What all audits share: canaries in the steps of one training, whatever they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from dpaudit.canaries import Coins, Draws
from dpaudit.stats._types import BoolArray, FloatArray
from dpaudit.training._step import Step
from dpaudit.training.gradients._rows import Rows

__all__ = ["AUGMENTING", "CRAFTING", "DROPPING", "SECOND_BATCH", "Inserted"]

# purposes of chance, besides those of Draws
SECOND_BATCH, CRAFTING, AUGMENTING, DROPPING = 2, 3, 4, 5


class Inserted(ABC):
    """Canaries in the steps of one training."""

    shares_noise: ClassVar[bool] = False
    """Whether the scores of one step depend on each other: canaries that are not orthogonal."""

    def __init__(self, draws: Draws | Coins) -> None:
        self._chance = draws

    @property
    def num_canaries(self) -> int:
        """How many there are."""
        return self._chance.num_canaries

    def chance(self, index: int, purpose: int = 0) -> np.random.Generator:
        """The generator of one step, or of whatever else is counted by ``index``."""
        return self._chance.chance(index, purpose)

    def coins(self, index: int) -> BoolArray:
        """Whether each canary is present: a fair coin each."""
        return self._chance.coins(index)

    def in_data(self) -> BoolArray:
        """Whether each canary is an entry of the data set: a fair coin each."""
        return self._chance.entries()

    @abstractmethod
    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> Sequence[Rows]:
        """The gradients of the canaries with these numbers, not clipped yet."""

    @abstractmethod
    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        """What the step released along each canary, in units of what it may add to the sum.

        The adversary knows all other examples. With ``residual`` it takes their sum off: what is left is
        noise, and 1 where the canary is.
        """

    def state_dict(self) -> dict[str, Any]:
        """What chance and the weights do not give again."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # chance is enough for most
        """Go on from where ``state_dict`` was taken."""

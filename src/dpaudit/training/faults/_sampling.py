"""Batches that are not those that were accounted for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpaudit import _validate

__all__ = ["ShuffledBatches"]


@dataclass
class ShuffledBatches:
    """Every epoch is shuffled and cut into batches, while Poisson sampling is accounted for.

    It keeps the rest of its epoch, so that one object belongs to one training.
    """

    sample_rate: float
    _left: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        _validate.sample_rate(self.sample_rate)

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:
        if not self._left:
            order = torch.randperm(num_examples, generator=generator)
            self._left = list(order.tensor_split(round(1 / self.sample_rate)))
        return self._left.pop().sort().values

    def state_dict(self) -> dict[str, Any]:
        """The batches that are left of this epoch."""
        return {"left": list(self._left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these."""
        self._left = list(state["left"])

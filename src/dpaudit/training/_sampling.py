"""Which examples are in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpaudit import _validate

__all__ = ["PoissonSampling", "Sampling", "Stateful"]


class Sampling(Protocol):
    """A way to choose the examples of a step."""

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:
        """The places of the chosen examples; there may be none."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A sampling that remembers something from step to step, which a checkpoint has to keep."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        ...


@dataclass(frozen=True)
class PoissonSampling:
    """Every example by a coin of its own: what the accounting assumes."""

    sample_rate: float

    def __post_init__(self) -> None:
        _validate.sample_rate(self.sample_rate)

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:
        # 53 random bits a coin: the 24 of single precision would round a small rate
        coins = torch.rand(num_examples, generator=generator, dtype=torch.float64)
        return (coins < self.sample_rate).nonzero().view(-1)

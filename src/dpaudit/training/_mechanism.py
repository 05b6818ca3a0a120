"""The Gaussian mechanism of a DP-SGD step: clip, sum, add noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit.training.gradients._clipped_sum import add_clipped
from dpaudit.training.gradients._rows import Rows

__all__ = ["GaussianSum", "Mechanism"]


class Mechanism(Protocol):
    """A private sum. A training takes any: a broken one is how an audit is tested."""

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        """Clip each gradient and add it to ``out``; returns the norms before clipping."""
        ...

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:
        """What is done with the whole sum before the noise: nothing, if every gradient was clipped."""
        ...

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """The noise of one step."""
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianSum:
    """A sum of gradients clipped to ``max_grad_norm``, with noise of ``noise_multiplier`` times that."""

    noise_multiplier: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        _validate.at_least("noise_multiplier", self.noise_multiplier, 0.0)
        _validate.positive("max_grad_norm", self.max_grad_norm)

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        return add_clipped(rows, self.max_grad_norm, out)

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:  # noqa: ARG002
        return total

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.empty_like(like).normal_(generator=generator)
        return drawn.mul_(self.noise_multiplier * self.max_grad_norm)

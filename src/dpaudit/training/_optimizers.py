"""What happens to the private gradient: descriptions that build torch's own optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dpaudit import _validate

__all__ = ["SGD", "Adam", "Optimizer"]


class Optimizer(Protocol):
    """A description of an optimizer."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent, with momentum if asked for."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate.positive("learning_rate", self.learning_rate)
        _validate.at_least("momentum", self.momentum, 0.0)
        _validate.at_least("weight_decay", self.weight_decay, 0.0)

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Kingma and Ba 2015, arXiv:1412.6980."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate.positive("learning_rate", self.learning_rate)
        for beta in self.betas:
            _validate.fraction("betas", beta)
        _validate.at_least("weight_decay", self.weight_decay, 0.0)

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            parameters, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )

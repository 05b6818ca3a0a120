"""Training settings: DP-SGD parameters, optimizers and augmentations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpaudit import _validate
from dpaudit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """DP-SGD parameters, from which a privacy claim is derived, and the optimizer.

    The gradients of ``multiplicity`` augmentations of an example are averaged before clipping.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    num_steps: int
    optimizer: Optimizer
    multiplicity: int = 1
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        _validate.at_least("noise_multiplier", self.noise_multiplier, 0.0)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        _validate.sample_rate(self.sample_rate)
        _validate.integer("num_steps", self.num_steps)
        if _validate.integer("multiplicity", self.multiplicity) > 1 and self.augmentation is None:
            raise InputError(
                f"Expected an augmentation with multiplicity={self.multiplicity}: identical copies of an "
                "input have no effect."
            )


class Optimizer(Protocol):
    """Optimizer settings; ``build`` returns the torch optimizer."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the torch optimizer for these parameters."""
        ...


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent, optionally with momentum."""

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
    """Adam optimizer (Kingma and Ba 2015, arXiv:1412.6980)."""

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


class Augmentation(Protocol):
    """Random transformation, drawn independently for every input of a batch."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the transformed inputs; row i depends only on input i."""
        ...


@dataclass(frozen=True)
class FlipAndCrop:
    """Random horizontal flip, and a random crop after ``padding`` by reflection (De et al. 2022)."""

    padding: int = 4

    def __post_init__(self) -> None:
        _validate.integer("padding", self.padding, low=0)

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        count, channels, height, width = inputs.shape
        padded = functional.pad(inputs, [self.padding] * 4, mode="reflect")
        rows = self._window(count, height, generator).to(inputs.device)
        columns = self._window(count, width, generator).to(inputs.device)
        mirrored = (torch.rand(count, generator=generator) < 0.5).to(inputs.device)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        padded = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
        return padded.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))

    def _window(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        start = torch.randint(2 * self.padding + 1, (count, 1), generator=generator)
        return start + torch.arange(length)

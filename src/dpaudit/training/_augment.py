"""Random changes of an image that keep its class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dpaudit import _validate

__all__ = ["Augmentation", "FlipAndCrop"]


class Augmentation(Protocol):
    """A random change, drawn anew for every input of a batch."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """The changed inputs; row i depends on input i only."""
        ...


@dataclass(frozen=True)
class FlipAndCrop:
    """Mirror every other image, and shift each by up to ``padding`` pixels (De et al. 2022)."""

    padding: int = 4

    def __post_init__(self) -> None:
        _validate.whole("padding", self.padding, low=0)

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

"""Where inputs live."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpaudit._torch._held_out import HeldOutData

__all__ = ["Domain"]


@dataclass(frozen=True, eq=False)
class Domain:
    """From ``low`` to ``high`` in each entry, or only these two values, if features are binary.

    Pixels of an image share one range. Features of a table have one each.
    """

    low: Tensor
    high: Tensor
    is_binary: bool

    @classmethod
    def of(cls, data: HeldOutData) -> Domain:
        """The range of held-out examples: that of the training's own is not looked at."""
        inputs = data.inputs
        if _has_two_values(inputs):
            return cls(inputs.min(), inputs.max(), is_binary=True)
        if inputs.dim() == 2:
            return cls(inputs.amin(dim=0), inputs.amax(dim=0), is_binary=False)
        return cls(inputs.min(), inputs.max(), is_binary=False)

    @property
    def span(self) -> Tensor:
        """The length of the range: the unit of steps and radii."""
        return self.high - self.low

    def nearest(self, inputs: Tensor) -> Tensor:
        """The nearest inputs in the domain; halfway is low."""
        if self.is_binary:
            return torch.where(inputs > (self.low + self.high) / 2, self.high, self.low)
        return inputs.clamp(self.low, self.high)

    def flipped(self, inputs: Tensor) -> Tensor:
        """Every binary feature as the other one."""
        return self.low + self.high - inputs


def _has_two_values(inputs: Tensor) -> bool:
    low, high = inputs.min(), inputs.max()
    return bool(low < high) and bool(((inputs == low) | (inputs == high)).all())

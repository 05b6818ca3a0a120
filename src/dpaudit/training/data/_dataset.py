"""Examples and their classes, in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit.errors import InputError

__all__ = ["Dataset", "as_inputs"]


def as_inputs(values: Tensor) -> Tensor:
    """What a model gets: bytes are brought to [-1, 1], everything else stays."""
    return values.float().div_(127.5).sub_(1.0) if values.dtype == torch.uint8 else values


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs, and for each a class from 0 to ``num_classes`` - 1.

    Pixels may stay bytes, which takes a quarter of the memory: they are brought to [-1, 1] when a batch is
    read. The range is fixed and not computed from the data, because that would be one more query to them.
    """

    inputs: Tensor
    targets: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        _validate.whole("num_classes", self.num_classes, low=2)
        if len(self.inputs) != len(self.targets) or len(self.targets) == 0:
            raise InputError(
                f"Expected as many inputs as targets and at least one, got {len(self.inputs)} inputs and "
                f"{len(self.targets)} targets."
            )
        if self.targets.is_floating_point():
            raise InputError(f"Expected classes that are whole numbers, got {self.targets.dtype}.")
        low, high = int(self.targets.min()), int(self.targets.max())
        if low < 0 or high >= self.num_classes:
            raise InputError(f"Expected classes in 0..{self.num_classes - 1}, got {low}..{high}.")

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"Dataset({len(self):,} examples of {shape}, {self.num_classes} classes)"

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])

    def at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some examples, ready for a model."""
        places = indices.to(self.inputs.device)
        inputs = self.inputs.index_select(0, places)
        return as_inputs(inputs), self.targets.index_select(0, places)

    def to(self, device: torch.device | str) -> Dataset:
        """The same on another device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def split(self, num_first: int) -> tuple[Dataset, Dataset]:
        """The first ``num_first`` examples, and the rest: for training and test."""
        if not 0 < num_first < len(self):
            raise InputError(f"Expected num_first={num_first} in [1, {len(self) - 1}].")
        first, rest = slice(None, num_first), slice(num_first, None)
        return tuple(  # type: ignore[return-value]
            replace(self, inputs=self.inputs[part], targets=self.targets[part]) for part in (first, rest)
        )

"""The examples of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpaudit import _validate
from dpaudit.errors import InputError

__all__ = ["Batch"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of some examples.

    With ``multiplicity`` > 1 every example has that many inputs, its augmentations, one after another; its
    gradient is the mean of theirs (De et al. 2022, arXiv:2204.13650), clipped as one.
    """

    inputs: Tensor
    targets: Tensor
    multiplicity: int = 1

    def __post_init__(self) -> None:
        _validate.whole("multiplicity", self.multiplicity)
        if len(self.inputs) != len(self.targets) * self.multiplicity:
            raise InputError(
                f"Expected {self.multiplicity} inputs for each target, "
                f"got {len(self.inputs)} inputs and {len(self.targets)} targets."
            )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def views(self) -> Tensor:
        """The inputs as examples x augmentations x shape."""
        return self.inputs.view(len(self), self.multiplicity, *self.inputs.shape[1:])

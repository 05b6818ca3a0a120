"""What one step of DP-SGD did."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Step"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step, between the noise and the update: what an audit may read.

    Only ``noisy_sum`` is private. The rest is what the strongest adversary knows, who knows every example but
    the canary.
    """

    index: int
    batch_size: int
    indices: Tensor
    """The places of the batch's examples in the data."""
    clipped_sum: Tensor
    """Of the examples of the batch."""
    noise: Tensor
    """What the mechanism added to the sum."""
    noisy_sum: Tensor
    """What the mechanism released: ``joined_sum`` and noise."""

    @property
    def joined_sum(self) -> Tensor:
        """Of the batch and of all gradients that hooks let join, up to rounding.

        It is made when it is asked for, because a step that kept it would have one vector more to fill.
        """
        return self.noisy_sum - self.noise

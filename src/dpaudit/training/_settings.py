"""The privacy-relevant settings of a training."""

from __future__ import annotations

from dataclasses import dataclass

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.training._augment import Augmentation
from dpaudit.training._optimizers import Optimizer

__all__ = ["DPSGD"]


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """What a training does: the numbers that a claim is made of, and how the model is updated.

    ``multiplicity`` averages the gradients of that many augmentations of an example before they are clipped.
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
        _validate.whole("num_steps", self.num_steps)
        if _validate.whole("multiplicity", self.multiplicity) > 1 and self.augmentation is None:
            raise InputError(
                f"Expected an augmentation with multiplicity={self.multiplicity}: copies of one input add "
                "nothing to it."
            )

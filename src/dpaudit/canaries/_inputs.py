"""Examples that an audit adds to the data of a training (Nasr et al. 2023, appendix C.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpaudit import _validate
from dpaudit.errors import InputError

__all__ = ["Adversarial", "Blank", "Crafted", "InputCanary", "Mislabelled"]


@dataclass(frozen=True)
class InputCanary:
    """An example, whose gradient a step clips and adds like that of any other example.

    It is made from examples that are held out of the training, and stays in the domain of their inputs:
    pixels stay in their range, binary features stay binary. Lengths are in units of that range.
    """

    looks_at_weights: ClassVar[bool] = False
    """Whether it is made for the weights that a model has at that moment."""


@dataclass(frozen=True)
class Blank(InputCanary):
    """Zero everywhere, with a random class."""


@dataclass(frozen=True)
class Mislabelled(InputCanary):
    """A held-out example with a random class that is not its own."""


@dataclass(frozen=True)
class Adversarial(InputCanary):
    """A held-out example, moved to where its loss is large: projected gradient ascent (Madry et al. 2018).

    No entry moves further than ``radius``; of binary features at most a share ``radius`` is flipped.
    """

    num_steps: int = 20
    step_size: float = 0.01
    radius: float = 0.03
    looks_at_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.whole("num_steps", self.num_steps)
        _validate.positive("step_size", self.step_size)
        _validate.positive("radius", self.radius)


@dataclass(frozen=True)
class Crafted(InputCanary):
    """A held-out example, moved to where its gradient is orthogonal to the mean gradient of the others.

    Algorithm 3 of the paper: it descends the absolute cosine of the two, at the weights of that moment.
    ``every`` so many steps of the training it is crafted anew; None: once, before the first step. ``long``
    also makes its gradient long: one that is shorter than the clipping norm tells less, and gradients become
    shorter as a model learns.
    """

    num_steps: int = 50
    step_size: float = 0.1
    every: int | None = None
    long: bool = False
    looks_at_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.whole("num_steps", self.num_steps)
        _validate.positive("step_size", self.step_size)
        if self.every is not None:
            _validate.whole("every", self.every)
        if not isinstance(self.long, bool):
            raise InputError(f"Expected long={self.long!r} to be True or False.")

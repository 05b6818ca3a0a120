"""Examples that an audit adds to the data of a training (Nasr et al. 2023, appendix C.3).

What the adversary of an audit may do and see. Which examples of a data set are held out of its training, for
canaries to be made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.errors import InputError


@dataclass(frozen=True)
class InputCanary:
    """An example, whose gradient a step clips and adds like that of any other example.

    It is made from examples that are held out of the training, and stays in the domain of their inputs:
    pixels stay in their range, binary features stay binary. Lengths are in units of that range.
    """

    looks_at_weights: ClassVar[bool] = False
    """Whether it is made for the weights that a model has at that moment."""

    def is_due(self, index: int, made_at: int | None) -> bool:  # noqa: ARG002
        """Whether to make it in step ``index``, if it was made in step ``made_at``; None: not yet."""
        return made_at is None


@dataclass(frozen=True)
class Blank(InputCanary):
    """Zero everywhere, or the nearest value in the domain, with a random class.

    Of two values that are as near, as with features of -1 and 1, it is the smaller one.
    """


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

    def is_due(self, index: int, made_at: int | None) -> bool:
        again = self.every is not None and index % self.every == 0 and index != made_at
        return again or super().is_due(index, made_at)

    def objective(self, cosine: Any, norm: Any, max_grad_norm: float) -> Any:
        """What is made small, from |cos| and norm of the canary's gradient; of numbers or any arrays.

        If it is to be ``long``, 1 / (1 + norm / max_grad_norm) is added: the longer the gradient, the better,
        and beyond the clipping norm ever less so.

        >>> Crafted().objective(0.5, 3.0, 1.0), Crafted(long=True).objective(0.5, 3.0, 1.0)
        (0.5, 0.75)
        """
        return cosine + 1 / (1 + norm / max_grad_norm) if self.long else cosine


class ThreatModel(Enum):
    """What the adversary inserts, and what it sees; section 3 of Nasr et al. 2023."""

    GRADIENT = "gradient"
    """Inserts a gradient, sees the private gradient of every step."""
    INPUT = "input"
    """Inserts an example, sees the private gradient of every step."""
    BLACK_BOX = "black-box"
    """Inserts an example, sees what the final model answers."""


def split_places(num_examples: int, num_held_out: int, seed: int) -> tuple[IntArray, IntArray]:
    """The places of those that are trained on and of those that are held out, drawn at random, in order.

    >>> split_places(5, 2, seed=0)
    (array([0, 1, 3]), array([2, 4]))
    """
    if not 0 < _validate.whole("num_held_out", num_held_out) < num_examples:
        raise InputError(f"Expected num_held_out={num_held_out} in [1, {num_examples - 1}].")
    order = np.random.default_rng(_validate.whole("seed", seed, low=0)).permutation(num_examples)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])

"""Input canaries: examples that an audit adds to training (Nasr et al. 2023, appendix C.3).

They are made from held-out examples. This module also selects the examples to hold out and has the checks
that all frameworks share; the examples are tensors or arrays, which the framework's ``hold_out`` splits.
A :class:`CraftingSearch` moves inputs through their :class:`InputDomain` to minimize an ``Objective``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.errors import InputError

Array = TypeVar("Array")
HeldOut = TypeVar("HeldOut", bound="HeldOutExamples[Any]")
_SPLIT = object()  # marks examples that were split off from a data set


@dataclass(frozen=True)
class InputCanary:
    """An example whose gradient is clipped and added like that of any other example.

    It is made from held-out examples and stays in the domain of their inputs: pixels stay in their range,
    binary features stay binary. Step sizes and radii are in units of that range.
    """

    uses_weights: ClassVar[bool] = False
    """Whether the canary is crafted for the current weights of the model."""

    def is_due(self, index: int, made_at: int | None) -> bool:  # noqa: ARG002
        """Return whether to craft it in step ``index``, if last crafted in step ``made_at`` (None: never)."""
        return made_at is None


@dataclass(frozen=True)
class Blank(InputCanary):
    """Zero everywhere, or the nearest value in the domain, with a random class.

    Ties, as with features of -1 and 1, go to the smaller value.
    """


@dataclass(frozen=True)
class Mislabelled(InputCanary):
    """A held-out example with a random wrong class."""


@dataclass(frozen=True)
class Adversarial(InputCanary):
    """A held-out example moved to increase its loss by projected gradient ascent (Madry et al. 2018).

    No entry moves further than ``radius``; at most a fraction ``radius`` of binary features is flipped.
    """

    num_steps: int = 20
    step_size: float = 0.01
    radius: float = 0.03
    uses_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.integer("num_steps", self.num_steps)
        _validate.positive("step_size", self.step_size)
        _validate.positive("radius", self.radius)


@dataclass(frozen=True)
class Crafted(InputCanary):
    """A held-out example moved to make its gradient orthogonal to the mean gradient of the others.

    Algorithm 3 of the paper: minimize the absolute cosine of the two at the current weights. The canary is
    crafted again every ``every`` training steps, or only once, before the first step, if None. ``long`` also
    makes its gradient long: a gradient shorter than the clipping norm reveals less, and gradients become
    shorter as a model learns.
    """

    num_steps: int = 50
    step_size: float = 0.1
    every: int | None = None
    long: bool = False
    uses_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.integer("num_steps", self.num_steps)
        _validate.positive("step_size", self.step_size)
        if self.every is not None:
            _validate.integer("every", self.every)
        _validate.flag("long", self.long)

    def is_due(self, index: int, made_at: int | None) -> bool:
        again = self.every is not None and index % self.every == 0 and index != made_at
        return again or super().is_due(index, made_at)

    def objective(self, cosine: Any, norm: Any, max_grad_norm: float) -> Any:
        """Return the value to minimize, from |cos| and norm of the canary's gradient (numbers or arrays).

        ``long`` adds 1 / (1 + norm / max_grad_norm): the longer the gradient, the better, with diminishing
        returns beyond the clipping norm.

        >>> Crafted().objective(0.5, 3.0, 1.0), Crafted(long=True).objective(0.5, 3.0, 1.0)
        (0.5, 0.75)
        """
        return cosine + 1 / (1 + norm / max_grad_norm) if self.long else cosine


class ThreatModel(Enum):
    """What the adversary inserts and observes (section 3 of Nasr et al. 2023)."""

    GRADIENT = "gradient"
    """Inserts a gradient and observes the private gradient of every step."""
    INPUT = "input"
    """Inserts an example and observes the private gradient of every step."""
    BLACK_BOX = "black-box"
    """Inserts an example and observes the outputs of the final model."""


@dataclass(frozen=True, eq=False)
class HeldOutExamples(Generic[Array]):
    """Preprocessed inputs and their classes; created only by a ``hold_out``, with :meth:`split_off`.

    Canaries are crafted from this type only, so that no batch is passed by mistake: the adversary of the
    paper knows examples from the same distribution, but not the training examples themselves.
    """

    inputs: Array
    targets: Array
    num_classes: int
    _mark: object = field(default=None, repr=False)
    _expected: ClassVar[str]

    def __post_init__(self) -> None:
        if self._mark is not _SPLIT:
            raise InputError(
                f"Held-out examples must be split off by {self._expected}: canaries must not be made from "
                "training examples."
            )

    @classmethod
    def split_off(cls, inputs: Array, targets: Array, num_classes: int) -> Self:
        """Mark examples of a data set as not used for training."""
        return cls(inputs, targets, _validate.integer("num_classes", num_classes, low=2), _SPLIT)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} examples, {self.num_classes} classes)"

    def __len__(self) -> int:
        return len(self.targets)  # type: ignore[arg-type]  # arrays of any framework have a length


def split_indices(num_examples: int, num_held_out: int, seed: int) -> tuple[IntArray, IntArray]:
    """Return the sorted indices of examples to train on and of randomly drawn examples to hold out.

    >>> split_indices(5, 2, seed=0)
    (array([0, 1, 3]), array([2, 4]))
    """
    if not 0 < _validate.integer("num_held_out", num_held_out) < num_examples:
        raise InputError(f"num_held_out must be between 1 and {num_examples - 1}, got {num_held_out}.")
    order = np.random.default_rng(_validate.integer("seed", seed, low=0)).permutation(num_examples)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])


def fingerprints(rows: np.ndarray) -> list[int]:
    """Return a number for each row; equal rows have equal numbers, others collide with probability 2**-64."""
    return [hash(row.tobytes()) for row in np.ascontiguousarray(rows)]


def unseen_indices(held_out: Iterable[int], seen: set[int]) -> IntArray:
    """Return the indices of held-out fingerprints that were not ``seen`` in training.

    Data sets contain duplicates, so an example can be held out and trained on.
    """
    is_new = np.array([digest not in seen for digest in held_out])
    if not is_new.any():
        raise InputError(
            f"held_out must not be used for training, but all of its {is_new.size} examples are."
        )
    return np.flatnonzero(is_new)


def require_held_out(canary: object, held_out: object, kind: type[HeldOut]) -> HeldOut:
    """Return the held-out examples; raise if they are not of this ``kind``, which input canaries need."""
    if not isinstance(held_out, kind):
        raise InputError(
            f"{canary!r} needs held_out=..., the examples that hold_out() splits off, got "
            f"{held_out if held_out is None else type(held_out).__name__}."
        )
    return held_out


def refuse_held_out(canary: object, held_out: object) -> None:
    """Raise if held-out examples are passed with a gradient canary."""
    if held_out is not None:
        raise InputError(f"{canary!r} is not made from examples; leave out held_out.")


Objective: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""Maps inputs and classes to one value each, the smaller the better, and its gradient in the input."""
Loop: TypeAlias = Callable[[int, Callable[[Any, Any], Any], Any], Any]
"""Calls a function of the step number and the state in each step; returns the last state."""


def _library(array: Any) -> Any:
    """Return the module with the functions of an array: NumPy, torch or ``jax.numpy``."""
    name = type(array).__module__.partition(".")[0]
    return sys.modules["jax.numpy" if name in {"jax", "jaxlib"} else name]


@dataclass(frozen=True, eq=False)
class InputDomain:
    """The range from ``low`` to ``high`` of each entry, or just these two values if features are binary.

    The pixels of an image share one range; the features of a table have one each. Arrays may be of any
    library.
    """

    low: Any
    high: Any
    is_binary: bool

    @classmethod
    def of(cls, inputs: Any) -> InputDomain:
        """Return the domain of these inputs, which are held-out examples."""
        low, high = inputs.min(), inputs.max()
        is_binary = bool(low < high) and bool(((inputs == low) | (inputs == high)).all())
        if inputs.ndim == 2 and not is_binary:
            low, high = _library(inputs).amin(inputs, 0), _library(inputs).amax(inputs, 0)
        return cls(low, high, is_binary)

    @property
    def span(self) -> Any:
        """The length of the range, the unit of step sizes and radii."""
        return self.high - self.low

    def nearest(self, inputs: Any) -> Any:
        """Return the nearest inputs in the domain, with the same type; ties go to ``low``."""
        arrays = _library(inputs)
        if self.is_binary:
            nearest = arrays.where(inputs > (self.low + self.high) / 2, self.high, self.low)
        else:
            nearest = arrays.clip(inputs, self.low, self.high)
        return arrays.asarray(nearest, dtype=inputs.dtype)

    def flipped(self, inputs: Any) -> Any:
        """Return the inputs with every binary feature flipped."""
        return self.low + self.high - inputs


@dataclass(frozen=True, kw_only=True, eq=False)
class CraftingSearch:
    """A search with ``num_steps`` steps of ``step_size`` spans, at most ``radius`` spans from the start.

    It returns the best input that it tried, so no canary is worse than the example it was made from. It runs
    with torch and inside code that JAX compiles; ``loop`` repeats its steps.
    """

    domain: InputDomain
    num_steps: int
    step_size: float
    radius: float | None = None
    loop: Loop

    def __call__(self, objective: Objective, inputs: Any, targets: Any) -> Any:
        """Return the best inputs found, starting from these."""
        search = self._flip_features if self.domain.is_binary else self._descend
        return search(objective, inputs, targets)

    def _descend(self, objective: Objective, start: Any, targets: Any) -> Any:
        """Step along the sign of the gradient: projected gradient descent."""
        arrays = _library(start)

        def step(number: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            inputs, gradients, best, least = state
            # shrinking steps: long ones find the region, short ones the minimum
            length = self.step_size * (1 - number / self.num_steps)
            inputs = self._project(start, inputs - length * self.domain.span * arrays.sign(gradients))
            values, gradients = objective(inputs, targets)
            ok = values < least  # false for NaN
            best = arrays.where(ok.reshape(-1, *[1] * (inputs.ndim - 1)), inputs, best)
            return inputs, gradients, best, arrays.where(ok, values, least)

        least, gradients = objective(start, targets)
        return self.loop(self.num_steps, step, (start, gradients, start, least))[2]

    def _project(self, start: Any, inputs: Any) -> Any:
        arrays = _library(start)
        inputs = arrays.asarray(inputs, dtype=start.dtype)
        if self.radius is not None:
            distance = self.radius * self.domain.span
            inputs = arrays.clip(inputs, start - distance, start + distance)
        return self.domain.nearest(arrays.asarray(inputs, dtype=start.dtype))

    def _flip_features(self, objective: Objective, start: Any, targets: Any) -> Any:
        """Flip the most promising features; if that fails, fewer of them, then others."""
        arrays, first = _library(start), start.reshape(len(start), -1)

        def step(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            best, least, gradients, counts, failed = state
            tried = self._choose_flips(best, first, gradients, counts, failed)
            inputs = arrays.where(tried, self.domain.flipped(best), best)
            values, new = objective(inputs.reshape(start.shape), targets)
            ok = values < least
            alone = ~ok & (counts == 1)
            return (
                arrays.where(ok[:, None], inputs, best),
                arrays.where(ok, values, least),
                arrays.where(ok[:, None], new.reshape(first.shape), gradients),
                arrays.where(ok | (counts == 1), counts, counts // 2),
                (failed | (tried & alone[:, None])) & ~ok[:, None],
            )

        least, gradients = objective(start, targets)
        share = self.step_size if self.radius is None else min(self.step_size, self.radius)
        counts = arrays.full_like(least, max(1, round(share * first.shape[1])))
        begin = first, least, gradients.reshape(first.shape), counts, arrays.isnan(first)  # none
        return self.loop(self.num_steps, step, begin)[0].reshape(start.shape)

    def _choose_flips(self, now: Any, start: Any, gradients: Any, counts: Any, failed: Any) -> Any:
        """Choose the features to flip: the ``counts`` most promising allowed ones of each input."""
        promise = -gradients * (self.domain.flipped(now) - now)
        allowed = ~failed
        if self.radius is not None:  # a flipped feature may always be flipped back
            room = max(1, round(self.radius * now.shape[1])) - (now != start).sum(1)
            allowed &= (now != start) | (room >= counts)[:, None]
        promise = _library(now).where(allowed, promise, -math.inf)
        ranks = promise.argsort(descending=True).argsort()
        return (ranks < counts[:, None]) & allowed

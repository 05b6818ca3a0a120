"""Canaries as arrays: the directions of gradients, and the examples that input canaries start from.

:func:`hold_out` splits off the examples that a training does not get. :class:`JaxInputDomain` is where the
inputs of canaries live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpaudit.canaries import (
    Adversarial,
    Blank,
    Crafted,
    Directions,
    HeldOutExamples,
    InputCanary,
    Mislabelled,
    fingerprints,
    require_held_out,
    split_indices,
    unseen_indices,
)
from dpaudit.errors import InputError


@dataclass(frozen=True, eq=False)
class JaxCanaryVectors:
    """The directions of a step's canaries; arrays of numpy, or tracers of a compiled step."""

    values: Any  # entries x canaries
    coordinates: Any  # the same shape, or None: the values lie row after row over all parameters
    num_parameters: int

    @classmethod
    def of(cls, directions: Directions) -> JaxCanaryVectors:
        """Make them in the precision and with the indices that jax computes with."""
        values, coordinates = directions.values.astype(np.float32), directions.coordinates
        indices = None if coordinates is None else coordinates.astype(np.int32)
        return cls(values, indices, directions.num_parameters)

    @property
    def num_canaries(self) -> int:
        """The number of canaries."""
        return int(self.values.shape[1])

    def project(self, vector: jax.Array) -> jax.Array:
        """Return the dot product of each direction with ``vector``."""
        if self.coordinates is not None:
            entries = vector[self.coordinates]
        else:
            missing = self.values.size - self.num_parameters
            entries = jnp.pad(vector, (0, missing)).reshape(self.values.shape)
        return jnp.sum(self.values * entries, axis=0)

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        """Return the sum of all directions, each times its weight."""
        weighted = jnp.ravel(self.values * weights)
        if self.coordinates is None:
            return weighted[: self.num_parameters]
        return jnp.zeros(self.num_parameters).at[self.coordinates.reshape(-1)].add(weighted)

    def rows(self, numbers: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the canaries with these numbers as dense gradients of these lengths: a row each."""
        chosen = jnp.arange(self.num_canaries)[None, :] == numbers[:, None]
        return jax.vmap(self.weighted_sum)(chosen * lengths[:, None])


def flat(tree: Any) -> jax.Array:
    """Return all numbers of a gradient, one after the other."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)])


def unflat(vectors: jax.Array, like: Any) -> Any:
    """Turn the last dimension into a gradient like this one; the dimensions before it stay."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = jnp.split(vectors, ends, axis=-1)
    shaped = [
        part.reshape(*vectors.shape[:-1], *leaf.shape).astype(leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


@dataclass(frozen=True, eq=False, repr=False)
class HeldOutArrays(HeldOutExamples[np.ndarray]):
    """Inputs and their classes; only :func:`hold_out` makes one, so that no batch is passed by mistake."""

    _expected: ClassVar[str] = "hold_out(inputs, targets, ...), got arrays"


@dataclass(frozen=True, eq=False)
class Given(InputCanary):
    """Examples of your own: each is a canary."""

    inputs: Any
    targets: Any

    def __post_init__(self) -> None:
        _require_pairs(np.asarray(self.inputs), np.asarray(self.targets))


def hold_out(
    inputs: Any, targets: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[tuple[np.ndarray, np.ndarray], HeldOutArrays]:
    """Return inputs and targets without ``num_held_out`` random examples, and those examples.

    Train on the first part, which nothing else ensures: the data set of compiled steps cannot be checked. So
    never split a batch. Held-out examples that the first part has too, as duplicates, are left out of the
    second. Classes are those that the targets have, unless ``num_classes`` says how many there are.
    """
    inputs, targets = np.asarray(inputs), np.asarray(targets)
    _require_pairs(inputs, targets)
    kept, held = split_indices(len(targets), num_held_out, seed)
    held = held[unseen_indices(fingerprints(inputs[held]), set(fingerprints(inputs[kept])))]
    count = 1 + int(targets.max()) if num_classes is None else num_classes
    return (inputs[kept], targets[kept]), HeldOutArrays.split_off(inputs[held], targets[held], count)


def _require_pairs(inputs: np.ndarray, targets: np.ndarray) -> None:
    if targets.ndim != 1 or inputs.ndim < 2 or len(inputs) != len(targets) or len(targets) == 0:
        raise InputError(
            f"Expected inputs and a class for each, got arrays of shapes {inputs.shape} and {targets.shape}."
        )


@dataclass(frozen=True, eq=False)
class JaxInputDomain:
    """From ``low`` to ``high`` in each entry, or only these two values, if features are binary.

    Pixels of an image share one range. Features of a table have one each.
    """

    low: np.ndarray
    high: np.ndarray
    is_binary: bool

    @classmethod
    def of(cls, inputs: np.ndarray) -> JaxInputDomain:
        """Return the domain of inputs that are known."""
        low, high = inputs.min(), inputs.max()
        if low < high and bool(((inputs == low) | (inputs == high)).all()):
            return cls(low, high, is_binary=True)
        axis = 0 if inputs.ndim == 2 else None
        return cls(inputs.min(axis=axis), inputs.max(axis=axis), is_binary=False)

    @property
    def span(self) -> np.ndarray:
        """The length of the range: the unit of steps and radii."""
        return np.asarray(self.high - self.low)

    def nearest(self, inputs: Any) -> Any:
        """Return the nearest inputs in the domain, of their type; halfway is low."""
        # numpy stays numpy: what is called from compiled code must not compute with jax, which would wait
        array = np if isinstance(inputs, np.ndarray) else jnp
        if self.is_binary:
            found = array.where(inputs > (self.low + self.high) / 2, self.high, self.low)
        else:
            found = array.clip(inputs, self.low, self.high)
        return found.astype(inputs.dtype)

    def flipped(self, inputs: Any) -> Any:
        """Return the inputs with every binary feature flipped."""
        return self.low + self.high - inputs


def require_examples(canary: InputCanary, data: object) -> None:
    """Raise if canaries of this kind cannot be made from the data."""
    if isinstance(canary, Given):
        if data is not None:
            raise InputError("Expected no held_out with Given(...), which has examples of its own.")
        return
    if not isinstance(canary, Blank | Mislabelled | Adversarial | Crafted):
        raise InputError(
            "Expected canary to be Blank(), Mislabelled(), Adversarial(), Crafted() or Given(...), "
            f"got {canary!r}."
        )
    dtype = require_held_out(canary, data, HeldOutArrays).inputs.dtype
    if canary.uses_weights and not np.issubdtype(dtype, np.floating):
        raise InputError(
            f"Expected inputs of floating-point numbers for {canary!r}, which needs how the loss changes "
            f"with them, got {dtype}: use Mislabelled()."
        )


def first_examples(
    canary: InputCanary, data: HeldOutArrays | None, num_canaries: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of canaries and their classes, each from an example of its own if there are enough."""
    if isinstance(canary, Given):
        return np.asarray(canary.inputs), np.asarray(canary.targets)
    assert data is not None  # as required
    chosen = rng.choice(len(data), num_canaries, replace=num_canaries > len(data))
    inputs, targets = data.inputs[chosen], data.targets[chosen]
    if isinstance(canary, Blank):
        zeros = JaxInputDomain.of(data.inputs).nearest(np.zeros_like(inputs))
        return zeros, rng.integers(0, data.num_classes, num_canaries).astype(targets.dtype)
    if isinstance(canary, Mislabelled):
        others = rng.integers(1, data.num_classes, num_canaries)
        return inputs, ((targets + others) % data.num_classes).astype(targets.dtype)
    return inputs, targets

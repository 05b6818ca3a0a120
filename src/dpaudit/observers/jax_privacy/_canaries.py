"""Canaries as arrays: the directions of gradient canaries, and the initial examples of input canaries.

:func:`hold_out` splits off examples that are not used for training. :class:`JaxInputDomain` is the domain of
canary inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    ParameterLayout,
    fingerprints,
    require_held_out,
    split_indices,
    unseen_indices,
)
from dpaudit.errors import InputError


@dataclass(frozen=True, eq=False)
class JaxCanaryVectors:
    """The directions of a step's canaries: NumPy arrays, or tracers in a compiled step."""

    values: Any  # entries x canaries
    coordinates: Any  # the same shape; if None, the values cover all parameters in row-major order
    num_parameters: int
    places: Any = None  # of canaries that share them, which are numbered after the others
    shared: Any = None  # places x canaries

    @classmethod
    def of(cls, directions: Directions) -> JaxCanaryVectors:
        """Return the vectors with the default float and index types of JAX."""
        values, coordinates = directions.values.astype(np.float32), directions.coordinates
        indices = None if coordinates is None else coordinates.astype(np.int32)
        if directions.shared is None:
            return cls(values, indices, directions.num_parameters)
        places, shared = directions.shared.places.astype(np.int32), directions.shared.values
        return cls(values, indices, directions.num_parameters, places, shared.astype(np.float32))

    @property
    def num_canaries(self) -> int:
        """The number of canaries."""
        return self.num_apart + (0 if self.shared is None else int(self.shared.shape[1]))

    @property
    def num_apart(self) -> int:
        """The number of canaries that share no coordinate with others; they come first."""
        return int(self.values.shape[1])

    def project(self, vector: jax.Array) -> jax.Array:
        """Return the dot product of each direction with ``vector``."""
        if self.coordinates is not None:
            entries = vector[self.coordinates]
        else:
            missing = self.values.size - self.num_parameters
            entries = jnp.pad(vector, (0, missing)).reshape(self.values.shape)
        apart = jnp.sum(self.values * entries, axis=0)
        if self.shared is None:
            return apart
        return jnp.concatenate([apart, vector[self.places] @ self.shared])

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        """Return the weighted sum of all directions."""
        weighted = jnp.ravel(self.values * weights[: self.num_apart])
        if self.coordinates is None:
            return weighted[: self.num_parameters]
        total = jnp.zeros(self.num_parameters).at[self.coordinates.reshape(-1)].add(weighted)
        if self.shared is None:
            return total
        return total.at[self.places].add(self.shared @ weights[self.num_apart :])

    def support(self) -> jax.Array:
        """Return whether any canary has an entry at each coordinate."""
        mask = jnp.zeros(self.num_parameters, bool)
        if self.coordinates is None:
            return ~mask
        mask = mask.at[self.coordinates.reshape(-1)].set(True)
        return mask if self.places is None else mask.at[self.places].set(True)

    def rows(self, numbers: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the canaries with these numbers as dense gradients with norms ``lengths``, one per row."""
        chosen = jnp.arange(self.num_canaries)[None, :] == numbers[:, None]
        return jax.vmap(self.weighted_sum)(chosen * lengths[:, None])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CompactLeaf:
    """The canary entries in one leaf, which chunks of canaries clip without the other coordinates.

    All arrays are chunks x columns; a column has one entry. Padding has the value 0.
    """

    values: Any
    numbers: Any  # of canaries
    coordinates: Any  # within the leaf; its size for padding

    @classmethod
    def of(cls, vectors: JaxCanaryVectors, sizes: Sequence[int], chunk: int) -> list[CompactLeaf]:
        """Return the entries in leaves with these sizes, for chunks of this many canaries."""
        coordinates = vectors.coordinates
        if coordinates is None:
            coordinates = np.arange(vectors.values.size).reshape(vectors.values.shape)
        entries, numbers = np.nonzero(vectors.values)
        places, values = coordinates[entries, numbers], vectors.values[entries, numbers]
        leaves, num_chunks = [], math.ceil(vectors.num_apart / chunk)
        for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            inside = np.flatnonzero((places >= first) & (places < first + size))
            inside = inside[np.argsort(numbers[inside] // chunk, kind="stable")]
            counts = np.bincount(numbers[inside] // chunk, minlength=num_chunks)
            where = np.arange(max(1, counts.max())) < counts[:, None]  # filled in order of the chunks
            numbered, filled = np.zeros(where.shape, np.int32), np.full(where.shape, size, np.int32)
            leaf = cls(np.zeros(where.shape, np.float32), numbered, filled)
            leaf.values[where], leaf.numbers[where] = values[inside], numbers[inside]
            leaf.coordinates[where] = places[inside] - first
            leaves.append(leaf)
        return leaves

    def chunk(self, number: int) -> CompactLeaf:
        """Return the entries of one chunk."""
        return CompactLeaf(self.values[number], self.numbers[number], self.coordinates[number])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SharedLeaf:
    """The places in one leaf that several canaries share, and the values there."""

    values: Any  # places x canaries
    coordinates: Any  # within the leaf; its size for padding

    @classmethod
    def of(cls, vectors: JaxCanaryVectors, sizes: Sequence[int]) -> list[SharedLeaf]:
        """Return the places in leaves with these sizes, at least one of each, which may be padding."""
        leaves = []
        for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            inside = (vectors.places >= first) & (vectors.places < first + size)
            values, where = vectors.shared[inside], (vectors.places[inside] - first).astype(np.int32)
            if where.size == 0:
                values, where = np.zeros((1, vectors.shared.shape[1]), np.float32), np.array([size], np.int32)
            leaves.append(cls(values, where))
        return leaves


def stacked(variants: Sequence[Any], padding: int = 0) -> Any:
    """Return trees of arrays with a new first axis; shorter arrays are padded at their end.

    Integers are padded with ``padding``, other numbers with 0.
    """

    def join(*arrays: np.ndarray) -> np.ndarray:
        shape = np.max([array.shape for array in arrays], axis=0)
        filled = padding if np.issubdtype(arrays[0].dtype, np.integer) else 0
        total = np.full((len(arrays), *shape), filled, arrays[0].dtype)
        for row, array in zip(total, arrays, strict=True):
            row[tuple(slice(size) for size in array.shape)] = array
        return total

    return jax.tree.map(join, *variants)


def layout_of(tree: Any, largest: float) -> ParameterLayout:
    """Return the named parameters of a gradient."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in leaves]
    return ParameterLayout(tuple(names), tuple(tuple(leaf.shape) for _, leaf in leaves), largest)


def flat(tree: Any) -> jax.Array:
    """Return a gradient as one flat vector."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)])


def unflat(vectors: jax.Array, like: Any) -> Any:
    """Return the last dimension as a gradient structured like ``like``; leading dimensions are kept."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    pieces = jnp.split(vectors, ends, axis=-1)
    shaped = [
        piece.reshape(*vectors.shape[:-1], *leaf.shape).astype(leaf.dtype)
        for piece, leaf in zip(pieces, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


@dataclass(frozen=True, eq=False, repr=False)
class HeldOutArrays(HeldOutExamples[np.ndarray]):
    """Inputs and their classes; created only by :func:`hold_out`, so that no batch is passed by mistake."""

    _expected: ClassVar[str] = "hold_out(inputs, targets, ...), got arrays"


@dataclass(frozen=True, eq=False)
class Given(InputCanary):
    """Examples of your own, each used as a canary."""

    inputs: Any
    targets: Any

    def __post_init__(self) -> None:
        _require_pairs(np.asarray(self.inputs), np.asarray(self.targets))


def hold_out(
    inputs: Any, targets: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[tuple[np.ndarray, np.ndarray], HeldOutArrays]:
    """Split off ``num_held_out`` random examples; return the remaining inputs and targets, and the examples.

    Train on the first part. This is not verified, because the data set of compiled steps cannot be checked,
    so never split a batch. Held-out examples with duplicates in the first part are dropped. The number of
    classes is taken from the targets unless ``num_classes`` is given.
    """
    inputs, targets = np.asarray(inputs), np.asarray(targets)
    _require_pairs(inputs, targets)
    rest, held = split_indices(len(targets), num_held_out, seed)
    held = held[unseen_indices(fingerprints(inputs[held]), set(fingerprints(inputs[rest])))]
    count = 1 + int(targets.max()) if num_classes is None else num_classes
    return (inputs[rest], targets[rest]), HeldOutArrays.split_off(inputs[held], targets[held], count)


def _require_pairs(inputs: np.ndarray, targets: np.ndarray) -> None:
    if targets.ndim != 1 or inputs.ndim < 2 or len(inputs) != len(targets) or len(targets) == 0:
        raise InputError(
            f"Expected inputs with one class each, got arrays of shapes {inputs.shape} and {targets.shape}."
        )


@dataclass(frozen=True, eq=False)
class JaxInputDomain:
    """The range from ``low`` to ``high`` of each entry, or just these two values if features are binary.

    The pixels of an image share one range; the features of a table have one each.
    """

    low: np.ndarray
    high: np.ndarray
    is_binary: bool

    @classmethod
    def of(cls, inputs: np.ndarray) -> JaxInputDomain:
        """Return the domain of these inputs."""
        low, high = inputs.min(), inputs.max()
        if low < high and bool(((inputs == low) | (inputs == high)).all()):
            return cls(low, high, is_binary=True)
        axis = 0 if inputs.ndim == 2 else None
        return cls(inputs.min(axis=axis), inputs.max(axis=axis), is_binary=False)

    @property
    def span(self) -> np.ndarray:
        """The length of the range, the unit of step sizes and radii."""
        return np.asarray(self.high - self.low)

    def nearest(self, inputs: Any) -> Any:
        """Return the nearest inputs in the domain, with the same type; ties go to ``low``."""
        # NumPy stays NumPy: callbacks from compiled code must not use JAX, which would deadlock
        array = np if isinstance(inputs, np.ndarray) else jnp
        if self.is_binary:
            nearest = array.where(inputs > (self.low + self.high) / 2, self.high, self.low)
        else:
            nearest = array.clip(inputs, self.low, self.high)
        return nearest.astype(inputs.dtype)

    def flipped(self, inputs: Any) -> Any:
        """Return the inputs with every binary feature flipped."""
        return self.low + self.high - inputs


def require_examples(canary: InputCanary, data: object) -> None:
    """Raise if canaries of this kind cannot be made from the data."""
    if isinstance(canary, Given):
        if data is not None:
            raise InputError("Expected no held_out with Given(...), which contains its own examples.")
        return
    if not isinstance(canary, Blank | Mislabelled | Adversarial | Crafted):
        raise InputError(
            "Expected canary to be Blank(), Mislabelled(), Adversarial(), Crafted() or Given(...), "
            f"got {canary!r}."
        )
    dtype = require_held_out(canary, data, HeldOutArrays).inputs.dtype
    if canary.uses_weights and not np.issubdtype(dtype, np.floating):
        raise InputError(
            f"Expected floating-point inputs for {canary!r}, which needs the gradient of the loss with "
            f"respect to them, got {dtype}: use Mislabelled()."
        )


def first_examples(
    canary: InputCanary, data: HeldOutArrays | None, num_canaries: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and classes of canaries, each from a different example if there are enough."""
    if isinstance(canary, Given):
        return np.asarray(canary.inputs), np.asarray(canary.targets)
    assert data is not None  # required for this canary
    chosen = rng.choice(len(data), num_canaries, replace=num_canaries > len(data))
    inputs, targets = data.inputs[chosen], data.targets[chosen]
    if isinstance(canary, Blank):
        zeros = JaxInputDomain.of(data.inputs).nearest(np.zeros_like(inputs))
        return zeros, rng.integers(0, data.num_classes, num_canaries).astype(targets.dtype)
    if isinstance(canary, Mislabelled):
        others = rng.integers(1, data.num_classes, num_canaries)
        return inputs, ((targets + others) % data.num_classes).astype(targets.dtype)
    return inputs, targets

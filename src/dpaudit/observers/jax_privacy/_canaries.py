"""Gradient canaries: their directions as arrays, and their way through the library's clipping.

A :class:`GradientInsertion` adds canaries to a clipped sum and scores them in a release. If only the library
clips, they are clipped on their own coordinates (:class:`CompactLeaf`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpaudit._types import FloatArray
from dpaudit.canaries import Directions, GradientCanary
from dpaudit.errors import InputError
from dpaudit.observers._session import AuditedSteps
from dpaudit.observers.jax_privacy._clipping import JaxClip
from dpaudit.observers.jax_privacy._step_callbacks import (
    StepCallbacks,
    flat,
    num_entries,
    shape_of,
    tolerance_of,
    unflat,
)

_CHUNK_ENTRIES = 2**24  # matrix entries of canary rows that are in memory together
_COMPACT_CHUNK = 128  # Dirac canaries to clip together on their own coordinates
_NUM_CANARIES, _NUM_FULL_ROWS = 1024, 64  # if there are as many parameters; if canaries need full rows


@dataclass(frozen=True, eq=False)
class JaxCanaryVectors:
    """The directions of a step's canaries: NumPy arrays, or tracers in a compiled step."""

    values: Any  # entries x canaries
    coordinates: Any  # the same shape
    num_parameters: int
    places: Any = None  # of canaries that share them, which are numbered after the others
    shared: Any = None  # places x canaries

    @classmethod
    def of(cls, directions: Directions) -> JaxCanaryVectors:
        """Return the vectors with the default float and index types of JAX."""
        coordinates = np.minimum(directions.explicit_coordinates, directions.num_parameters - 1)
        apart = directions.values.astype(np.float32), coordinates.astype(np.int32)
        if directions.shared is None:
            return cls(*apart, directions.num_parameters)
        places, shared = directions.shared.places.astype(np.int32), directions.shared.values
        return cls(*apart, directions.num_parameters, places, shared.astype(np.float32))

    @property
    def num_canaries(self) -> int:
        """The number of canaries."""
        return self.num_apart + (0 if self.shared is None else int(self.shared.shape[1]))

    @property
    def num_apart(self) -> int:
        """The number of canaries that share no coordinate with others; they come first."""
        return int(self.values.shape[1])

    @property
    def entries(self) -> list[tuple[Any, Any]]:
        """Values and coordinates (entries x canaries) of canaries apart, and of those that share places."""
        apart = [(self.values, self.coordinates)]
        if self.shared is None:
            return apart
        return [*apart, (self.shared, np.broadcast_to(self.places[:, None], self.shared.shape))]

    def project(self, vector: jax.Array) -> jax.Array:
        """Return the dot product of each direction with ``vector``."""
        apart = jnp.sum(self.values * vector[self.coordinates], axis=0)
        if self.shared is None:
            return apart
        return jnp.concatenate([apart, vector[self.places] @ self.shared])

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        """Return the weighted sum of all directions."""
        weighted = jnp.ravel(self.values * weights[: self.num_apart])
        total = jnp.zeros(self.num_parameters).at[self.coordinates.reshape(-1)].add(weighted)
        if self.shared is None:
            return total
        return total.at[self.places].add(self.shared @ weights[self.num_apart :])

    def support(self) -> jax.Array:
        """Return whether any canary has an entry at each coordinate."""
        mask = jnp.zeros(self.num_parameters, bool).at[self.coordinates.reshape(-1)].set(True)
        return mask if self.places is None else mask.at[self.places].set(True)

    def rows(self, numbers: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the canaries with these numbers as dense gradients with norms ``lengths``, one per row."""
        chosen = jnp.arange(self.num_canaries)[None, :] == numbers[:, None]
        return jax.vmap(self.weighted_sum)(chosen * lengths[:, None])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CompactLeaf:
    """The entries of canaries in one leaf, without the coordinates that a chunk of canaries leaves out."""

    values: Any  # chunks x canaries of a chunk x columns
    coordinates: Any  # chunks x columns, within the leaf; its size for padding

    @classmethod
    def of(cls, values: Any, coordinates: Any, sizes: Sequence[int], chunk: int) -> list[CompactLeaf]:
        """Return the entries (entries x canaries) in leaves with these sizes, in chunks of canaries."""
        entries, numbers = np.nonzero(values)
        places, values = coordinates[entries, numbers], values[entries, numbers]
        leaves, num_chunks = [], math.ceil(coordinates.shape[1] / chunk)
        for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            inside = (places >= first) & (places < first + size)
            owners = numbers[inside]
            keys, inverse = np.unique(owners // chunk * size + places[inside] - first, return_inverse=True)
            chunks, coordinate = np.divmod(keys, max(size, 1))
            column = np.arange(keys.size) - np.searchsorted(chunks, chunks)
            width = 1 + column.max(initial=0)
            leaf = cls(
                np.zeros((num_chunks, chunk, width), np.float32), np.full((num_chunks, width), size, np.int32)
            )
            leaf.values[owners // chunk, owners % chunk, column[inverse]] = values[inside]
            leaf.coordinates[chunks, column] = coordinate
            leaves.append(leaf)
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


class GradientInsertion:
    """Gradient canaries, which pass only through the library's clipping."""

    def __init__(self, callbacks: StepCallbacks, canary: GradientCanary) -> None:
        if canary.moving and canary.num_variants > 1:
            raise InputError(f"canary must not move, got {canary!r}; pass moving=False.")
        self._callbacks, self._audited, self._canary = callbacks, callbacks.audited, canary
        self._plans: CanaryPlans | None = None

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        norm, plans = clip.norm(self._callbacks.norm), self._plans or self._planned(clip, total)
        vectors, variant = self._vectors(plans)
        lengths = norm * plans.lengths(variant) * self._callbacks.presence()
        canaries = self._clipped(_ClipCall(clip, args, total), vectors, lengths, variant)
        joined = jax.tree.map(jnp.add, total, canaries)
        strays = _strays(vectors, flat(canaries), tolerance_of(total))
        batch, both = vectors.project(flat(total)), vectors.project(flat(joined))
        self._callbacks.call(self._note, None, batch, both, *strays, measured)
        return joined

    def _planned(self, clip: JaxClip, total: Any) -> CanaryPlans:
        """Lay the canaries out on the first gradient; if no number is given, as many as fit."""
        if not self._audited.is_number_known:
            limit = _NUM_FULL_ROWS if clip.needs_full_rows or self._canary.moving else _NUM_CANARIES
            fitting = max(1, num_entries(total) // self._canary.places_per_canary)
            # a resumed run has as many canaries as before
            self._audited.choose_number(self._audited.steps.recorder.num_canaries or min(limit, fitting))
        self._plans = CanaryPlans(self._audited, self._canary)
        return self._plans

    @property
    def _made_plans(self) -> CanaryPlans:
        assert self._plans is not None  # since the first call of the gradient function
        return self._plans

    def _clipped(self, call: _ClipCall, vectors: JaxCanaryVectors, lengths: jax.Array, variant: Any) -> Any:
        """Return the clipped sum of canaries of these lengths."""
        clip = call.clip
        if clip.needs_full_rows or self._canary.moving:  # whose coordinates are not known yet
            return _clipped_rows(call, vectors, lengths)
        size = max(1, round(_COMPACT_CHUNK / math.sqrt(len(vectors.values))))
        sizes = [_multiple(min(size, vectors.num_apart), clip)]
        if vectors.shared is not None:
            sizes.append(_multiple(vectors.num_canaries - vectors.num_apart, clip))
        groups = self._made_plans.compact(variant, sizes)
        totals = [
            _clipped_compact(call, leaves, group)
            for leaves, group in zip(groups, jnp.split(lengths, [vectors.num_apart]), strict=False)
        ]
        return jax.tree.map(lambda *sums: sum(sums), *totals)

    def _note(self, batch: Any, joined: Any, outside: Any, inside: Any, measured: Any) -> None:
        self._callbacks.add_pending(batch, joined, measured)
        if inside and not outside and self._canary.num_variants > 1:  # what arrives is tested
            self._audited.steps.note_not_covered(
                "clipping changes the direction of canaries, so that they are not subtracted completely and "
                "the weights differ from those without the audit"
            )
        elif outside or inside:
            raise InputError(
                "The gradient function must only clip, scale and sum, but it also adds other terms or "
                "changes directions, which cannot be distinguished from canaries; apply these after the "
                "noise."
            )

    def subtract(self, arrived: Any, released: Any) -> Any:
        vectors, _ = self._vectors(self._made_plans)
        after, before = (vectors.project(flat(tree)) for tree in (released, arrived))
        sampled = self._callbacks.sample_release(released, arrived)
        room = np.float32(tolerance_of(arrived))
        inserted = self._callbacks.call(self._release, shape_of(after), after, before, sampled, room)
        return jax.tree.map(jnp.subtract, arrived, unflat(vectors.weighted_sum(inserted), arrived))

    def _release(self, products: Any, arrived: Any, sampled: Any, tolerance: Any) -> FloatArray:
        """Keep the scores of a release; return the contribution of the canaries to the sum ``arrived``."""
        pending, scale = self._callbacks.take_pending(arrived, tolerance)
        with self._audited.steps.guard():
            scores = (np.asarray(products, np.float64) - scale * pending.batch) / self._callbacks.norm
            self._callbacks.finish_release(scores, pending, scale, sampled)
        inserted: FloatArray = np.nan_to_num(scale * pending.inserted, nan=0.0, posinf=0.0, neginf=0.0)
        return inserted.astype(np.float32)

    def _vectors(self, plans: CanaryPlans) -> tuple[JaxCanaryVectors, Any]:
        """Return the directions of this step's canaries and their variant; called inside compiled code."""
        if self._canary.moving:
            first = plans.vectors(0)
            shapes = jax.tree.map(shape_of, (first.values, first.coordinates))
            values, coordinates = self._callbacks.call(self._moved, shapes)
            return JaxCanaryVectors(values, coordinates, first.num_parameters), 0
        variant: Any = 0
        if self._canary.num_variants > 1:
            variant = self._callbacks.call(self._variant, shape_of(np.zeros((), np.int32)))
        return plans.vectors(variant), variant

    def _variant(self) -> np.ndarray:
        return np.asarray(self._canary.variant(self._audited.steps.index), np.int32)

    def _moved(self) -> tuple[Any, Any]:
        vectors = JaxCanaryVectors.of(self._audited.directions)
        return vectors.values, vectors.coordinates


class CanaryPlans:
    """All sets of directions that steps take in turn, in arrays from which compiled code selects one."""

    def __init__(self, audited: AuditedSteps, canary: GradientCanary) -> None:
        self._layout = audited.layout
        sets = [audited.directions_of(index) for index in range(1 if canary.moving else canary.num_variants)]
        self._vectors = [JaxCanaryVectors.of(directions) for directions in sets]
        self._lengths = np.stack([canary.lengths(directions) for directions in sets]).astype(np.float32)
        self._arrays = stacked([(v.values, v.coordinates, v.places, v.shared) for v in self._vectors])
        self._compact: dict[tuple[int, ...], Any] = {}

    def _chosen(self, arrays: Any, variant: Any) -> Any:
        """Return the arrays of one set."""
        if len(self._vectors) == 1:
            return jax.tree.map(lambda array: array[0], arrays)
        return jax.tree.map(lambda array: jnp.asarray(array)[variant], arrays)

    def vectors(self, variant: Any) -> JaxCanaryVectors:
        """Return one set of directions."""
        values, coordinates, places, shared = self._chosen(self._arrays, variant)
        return JaxCanaryVectors(values, coordinates, self._layout.num_parameters, places, shared)

    def lengths(self, variant: Any) -> Any:
        """Return the norm of each canary in clipping norms."""
        return self._chosen(self._lengths, variant)

    def compact(self, variant: Any, chunks: Sequence[int]) -> list[list[CompactLeaf]]:
        """Return the entries of one set in each leaf: of canaries apart, and of those that share places.

        ``chunks`` are the numbers of canaries of each kind that are clipped together.
        """
        key = tuple(chunks)
        if key not in self._compact:
            sizes = [int(size) for size in self._layout.sizes]
            self._compact[key] = [
                self._stacked_leaves([vectors.entries[kind] for vectors in self._vectors], sizes, chunk)
                for kind, chunk in enumerate(chunks)
            ]
        groups: list[list[CompactLeaf]] = self._chosen(self._compact[key], variant)
        return groups

    @staticmethod
    def _stacked_leaves(sets: list[tuple[Any, Any]], sizes: list[int], chunk: int) -> list[Any]:
        variants = [CompactLeaf.of(*entries, sizes, chunk) for entries in sets]
        # padding has a coordinate past the last one of its leaf
        return [stacked([leaves[i] for leaves in variants], size) for i, size in enumerate(sizes)]


@dataclass(frozen=True, eq=False)
class _ClipCall:
    """A call of the gradient function, in which canaries are clipped like its examples."""

    clip: JaxClip
    args: tuple[Any, ...]
    like: Any  # structured like a gradient

    def total(self, rows: Any) -> Any:
        """Return the clipped sum of ``rows``."""
        return self.clip.total(self.args, rows)


def _multiple(count: int, clip: JaxClip) -> int:
    """Return the number of rows that ``count`` canaries need: a multiple of the microbatch size."""
    return clip.multiple * math.ceil(count / clip.multiple)


def _clipped_compact(call: _ClipCall, compact: list[CompactLeaf], lengths: jax.Array) -> Any:
    """Return the clipped sum of canaries of these lengths, one chunk after another."""
    leaves, structure = jax.tree.flatten(call.like)
    num_chunks, size, _ = compact[0].values.shape
    padded = jnp.pad(lengths, (0, num_chunks * size - lengths.size)).reshape(num_chunks, size, 1)

    def clipped(chunk: Any) -> list[jax.Array]:
        rows = [
            (entries * chunk[1]).reshape(_narrow(leaf, size)).astype(leaf.dtype)
            for leaf, entries in zip(leaves, chunk[0], strict=True)
        ]
        total = call.total(jax.tree.unflatten(structure, rows))
        return [jnp.ravel(leaf) for leaf in jax.tree.leaves(total)]

    chunks = [entries.values for entries in compact], padded
    if num_chunks > 1 and isinstance(lengths, jax.core.Tracer):  # otherwise compiled in each step
        sums = jax.lax.scan(lambda _, chunk: (None, clipped(chunk)), None, chunks)[1]
    else:
        each = [clipped(jax.tree.map(lambda array: array[i], chunks)) for i in range(num_chunks)]  # noqa: B023
        sums = [jnp.stack(totals) for totals in zip(*each, strict=True)]
    placed = [
        jnp.zeros(leaf.size, total.dtype).at[entries.coordinates].add(total, mode="drop").reshape(leaf.shape)
        for leaf, entries, total in zip(leaves, compact, sums, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def _narrow(leaf: Any, num_rows: int) -> tuple[int, ...]:
    """Return the shape of rows with as many dimensions as the rows of a leaf."""
    return (num_rows, -1, *[1] * (leaf.ndim - 1)) if leaf.ndim else (num_rows,)


def _clipped_rows(call: _ClipCall, vectors: JaxCanaryVectors, lengths: jax.Array) -> Any:
    """Return the clipped sum of canaries, from rows with an entry for each parameter."""

    def clipped(numbers: jax.Array) -> Any:
        inside = jnp.minimum(numbers, vectors.num_canaries - 1)
        rows = vectors.rows(inside, jnp.where(numbers == inside, lengths[inside], 0.0))
        return call.total(unflat(rows, call.like))

    chunks = _chunks(vectors, call.clip.multiple)
    first = clipped(chunks[0])
    if len(chunks) == 1:
        return first
    add = lambda total, chunk: (jax.tree.map(jnp.add, total, clipped(chunk)), None)  # noqa: E731
    return jax.lax.scan(add, first, chunks[1:])[0]


def _strays(vectors: JaxCanaryVectors, canaries: jax.Array, tolerance: float) -> tuple[jax.Array, jax.Array]:
    """Return whether a sum is not a linear combination of canaries, outside and at their coordinates."""
    strays = jnp.abs(canaries - vectors.weighted_sum(vectors.project(canaries)))
    room, inside = tolerance * jnp.max(jnp.abs(canaries)), vectors.support()
    return jnp.max(jnp.where(inside, 0.0, strays)) > room, jnp.max(jnp.where(inside, strays, 0.0)) > room


def _chunks(vectors: JaxCanaryVectors, multiple: int) -> jax.Array:
    """Return canary numbers, as many per row as fit in memory; numbers past the last canary are padding."""
    fitting = max(1, _CHUNK_ENTRIES // vectors.num_parameters)
    size = multiple * math.ceil(min(fitting, vectors.num_canaries) / multiple)
    return jnp.arange(size * math.ceil(vectors.num_canaries / size)).reshape(-1, size)

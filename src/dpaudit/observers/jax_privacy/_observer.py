"""Canaries, inserted between the clipping and the noise of a step.

:class:`JaxObserver` wraps a gradient function and a privatizer. An :class:`Insertion` adds canaries and
scores them in a release: gradient canaries here, input canaries in ``_input_observer``.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.clipping import BoundedSensitivityCallable

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.canaries import ParameterLayout
from dpaudit.errors import InputError
from dpaudit.observers._session import LaidOutCanaries, require_same_parameters
from dpaudit.observers.jax_privacy._canaries import (
    CompactLeaf,
    JaxCanaryVectors,
    SharedLeaf,
    flat,
    layout_of,
    stacked,
    unflat,
)
from dpaudit.observers.jax_privacy._clipping import JaxClip, marked
from dpaudit.observers.jax_privacy._step_callbacks import StepCallbacks, precision_of, shape_of

_CHUNK_ENTRIES = 2**24  # matrix entries of canary rows that are in memory together
_COMPACT_CHUNK = 128  # Dirac canaries to clip together on their own coordinates
_NUM_CANARIES, _NUM_FULL_ROWS = 1024, 64  # if there are as many parameters; if canaries need full rows
_ROOM_FOR_SQUARES = 16.0  # between the square root of the largest number and the longest canary
_TOLERANCE = 1e-4  # orders of magnitude above the rounding error of sums and below the noise


class Insertion(Protocol):
    """Canaries of one kind; both methods are called inside compiled code."""

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        """Return ``total``, the sum computed from these arguments, plus the canaries of this step.

        ``measured`` is to be passed to :meth:`StepCallbacks.add_pending`.
        """

    def subtract(self, arrived: Any, released: Any) -> Any:
        """Score the canaries in ``released``; return ``arrived``, the sum before noise, without them."""


class JaxObserver:
    """An observer that adds canaries to the clipped sum and subtracts them after the noise."""

    def __init__(
        self, callbacks: StepCallbacks, insertion: Insertion, max_grad_norm: float | None = None
    ) -> None:
        self._callbacks, self._insertion = callbacks, insertion
        self._stated = None if max_grad_norm is None else _validate.positive("max_grad_norm", max_grad_norm)
        callbacks.scale.free = max_grad_norm is not None
        self._layout: ParameterLayout | None = None  # of the first gradient, on which canaries are laid out

    def gradient(self, grad_fn: Any) -> BoundedSensitivityCallable:
        """Return a function like ``grad_fn`` whose returned sum contains canaries."""
        clip = JaxClip(grad_fn)
        bound = self._stated or clip.bound
        if not 0 < bound < math.inf:
            raise InputError(
                f"Expected a finite clipping norm, got {bound:g}: pass max_grad_norm=... instead."
            )
        self._callbacks.norm, self._callbacks.bound = bound, clip.bound

        def observed(*args: Any, **kwargs: Any) -> Any:
            result = grad_fn(*args, **kwargs)
            total = result[0] if clip.has_aux else result
            self._require_same(layout_of(total, math.inf))
            measured = clip.measured(args, kwargs, result)
            weights = measured["weights"]
            measured |= {
                "examples": self._callbacks.sample(total),
                "weights": None if weights is None else self._callbacks.sample(weights),
                "row_digests": clip.digests(args, kwargs) if self._callbacks.tests_rows else None,
            }
            joined = self._insertion.join(clip, args, total, measured)
            return (joined, *result[1:]) if clip.has_aux else joined

        return BoundedSensitivityCallable(marked(observed), clip.bound, clip.has_aux)

    def privatizer(self, privatizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return a transformation like ``privatizer`` whose output contains no canaries.

        The privatizer is called twice with the same state: the release with canaries is scored, and the one
        without them is returned. Both have the same noise, and any other processing is applied to both.
        """
        signature = inspect.signature(privatizer.update)

        def update(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            name, arrived = next(iter(call.arguments.items()))
            self._require_like(arrived)
            released, _ = privatizer.update(*call.args, **call.kwargs)
            self._require_like(released)
            call.arguments[name] = self._insertion.subtract(arrived, released)
            return privatizer.update(*call.args, **call.kwargs)

        return privatizer._replace(update=marked(update))

    def _require_same(self, layout: ParameterLayout) -> None:
        """Raise if the gradient has other parameters than in the first step."""
        if self._layout is None:
            self._layout, self._callbacks.names = layout, layout.names
        require_same_parameters(self._layout, layout)

    def _require_like(self, gradient: Any) -> None:
        if self._layout is None:
            raise InputError(
                "Expected the gradient function returned by observe() to be called before the update of the "
                "privatizer, but it was not."
            )
        expected, shapes = list(self._layout.shapes), _shapes(gradient)
        if shapes != expected:
            raise InputError(
                f"Expected a gradient of shapes {expected}, as returned by clipped_grad, got {shapes}."
            )


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]


class GradientInsertion:
    """Gradient canaries, which pass only through the library's clipping."""

    def __init__(self, callbacks: StepCallbacks, canaries: LaidOutCanaries) -> None:
        canary = canaries.canary
        if canary.moving and canary.num_variants > 1:
            raise InputError(f"Expected canaries that do not move, got {canary!r}: pass moving=False.")
        self._callbacks, self._canaries, self._canary = callbacks, canaries, canary
        self._plans: CanaryPlans | None = None

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        norm = clip.norm(self._callbacks.norm)
        plans = self._plans or self._planned(clip, total, norm)
        vectors, variant = self._vectors(plans)
        lengths = norm * plans.lengths(variant) * self._callbacks.presence(self._canaries.draws)
        canaries = self._clipped(_ClipCall(clip, args, total), vectors, lengths, variant)
        joined = jax.tree.map(jnp.add, total, canaries)
        strays = _strays(vectors, flat(canaries), tolerance_of(total))
        batch, both = vectors.project(flat(total)), vectors.project(flat(joined))
        self._callbacks.call(self._note, None, batch, both, *strays, measured)
        return joined

    def _planned(self, clip: JaxClip, total: Any, norm: float) -> CanaryPlans:
        """Lay the canaries out on the first gradient; if no number is given, as many as fit."""
        if not self._canaries.is_number_known:
            limit = _NUM_FULL_ROWS if clip.needs_full_rows or self._canary.moving else _NUM_CANARIES
            fitting = max(1, num_entries(total) // self._canary.places_per_canary)
            # a resumed run has as many canaries as before
            self._canaries.choose_number(self._callbacks.scores_per_step or min(limit, fitting))
        self._canaries.lay_out(layout_of(total, _longest(total) / norm))
        self._plans = CanaryPlans(self._canaries)
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
        size = clip.multiple * math.ceil(min(size, vectors.num_apart) / clip.multiple)
        apart, shared = self._made_plans.compact(variant, size)
        total = _clipped_compact(call, apart, lengths[: vectors.num_apart], size)
        if shared is None:
            return total
        return _plus_shared(total, call, shared, lengths[vectors.num_apart :])

    def _note(self, batch: Any, joined: Any, outside: Any, inside: Any, measured: Any) -> None:
        if inside and not outside and self._canary.num_variants > 1:  # what arrives is tested
            self._callbacks.note_not_covered(
                "clipping changes the direction of canaries, so that they are not subtracted completely and "
                "the weights differ from those without the audit"
            )
        elif outside or inside:
            raise InputError(
                "Expected a gradient function that only clips, scales and sums, got one that also adds other "
                "terms or changes directions, which cannot be distinguished from canaries: apply these after "
                "the noise."
            )
        self._callbacks.add_pending(batch, joined, measured)

    def subtract(self, arrived: Any, released: Any) -> Any:
        vectors, _ = self._vectors(self._made_plans)
        after, before = (vectors.project(flat(tree)) for tree in (released, arrived))
        sampled = self._callbacks.sample_release(released, arrived)
        self._canaries.eps = self._callbacks.eps
        room = np.float32(tolerance_of(arrived))
        inserted = self._callbacks.call(self._release, shape_of(after), after, before, sampled, room)
        return jax.tree.map(jnp.subtract, arrived, unflat(vectors.weighted_sum(inserted), arrived))

    def _release(self, products: Any, arrived: Any, sampled: Any, tolerance: Any) -> FloatArray:
        """Keep the scores of a release; return the contribution of the canaries to the sum ``arrived``."""
        pending, scale = self._callbacks.take_pending(arrived, tolerance)
        scores = (np.asarray(products, np.float64) - scale * pending.batch) / self._callbacks.norm
        self._callbacks.finish_release(scores, pending, scale, sampled)
        return (scale * pending.finite_inserted).astype(np.float32)

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
        return np.asarray(self._canary.variant(self._callbacks.step), np.int32)

    def _moved(self) -> tuple[Any, Any]:
        vectors = JaxCanaryVectors.of(self._canaries.directions(self._callbacks.step))
        return vectors.values, vectors.coordinates


class CanaryPlans:
    """All sets of directions that steps take in turn, in arrays from which compiled code selects one."""

    def __init__(self, canaries: LaidOutCanaries) -> None:
        self._layout, canary = canaries.layout, canaries.canary
        sets = [canaries.directions(index) for index in range(1 if canary.moving else canary.num_variants)]
        self._vectors = [JaxCanaryVectors.of(directions) for directions in sets]
        self._lengths = np.stack([canary.lengths(directions) for directions in sets]).astype(np.float32)
        self._arrays = stacked([(v.values, v.coordinates, v.places, v.shared) for v in self._vectors])
        self._compact: dict[int, Any] = {}

    def _chosen(self, arrays: Any, variant: Any) -> Any:
        """Return the arrays of one set."""
        if len(self._vectors) == 1:
            return jax.tree.map(lambda array: array[0], arrays)
        return jax.tree.map(lambda array: jnp.asarray(array)[variant], arrays)

    def vectors(self, variant: Any) -> JaxCanaryVectors:
        """Return one set of directions."""
        if len(self._vectors) == 1:
            return self._vectors[0]
        values, coordinates, places, shared = self._chosen(self._arrays, variant)
        return JaxCanaryVectors(values, coordinates, self._layout.num_parameters, places, shared)

    def lengths(self, variant: Any) -> Any:
        """Return the norm of each canary in clipping norms."""
        return self._chosen(self._lengths, variant)

    def compact(self, variant: Any, chunk: int) -> tuple[list[CompactLeaf], list[SharedLeaf] | None]:
        """Return the entries of one set in each leaf, for chunks of this many canaries."""
        if chunk not in self._compact:
            sizes = [int(size) for size in self._layout.sizes]
            apart = [CompactLeaf.of(vectors, sizes, chunk) for vectors in self._vectors]
            shared = [
                SharedLeaf.of(vectors, sizes) for vectors in self._vectors if vectors.shared is not None
            ]
            # padding has a coordinate past the last one of its leaf
            self._compact[chunk] = [
                [stacked([leaves[i] for leaves in variants], size) for i, size in enumerate(sizes)]
                for variants in (apart, shared)
                if variants
            ]
        chosen = self._chosen(self._compact[chunk], variant)
        return chosen[0], chosen[1] if len(chosen) > 1 else None


def num_entries(tree: Any) -> int:
    """Return the number of entries of a gradient."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def tolerance_of(tree: Any) -> float:
    """Return the largest relative difference that rounding may cause between two ways to compute a sum."""
    return max(_TOLERANCE, 4 * precision_of(tree))


@dataclass(frozen=True, eq=False)
class _ClipCall:
    """A call of the gradient function, in which canaries are clipped like its examples."""

    clip: JaxClip
    args: tuple[Any, ...]
    like: Any  # structured like a gradient

    def total(self, rows: Any) -> Any:
        """Return the clipped sum of ``rows``."""
        return self.clip.total(self.args, rows)


def _longest(tree: Any) -> float:
    """Return the longest vector whose square every leaf can represent, with some room."""
    largest = min(float(jnp.finfo(leaf.dtype).max) for leaf in jax.tree.leaves(tree))  # type: ignore[no-untyped-call]
    return math.sqrt(largest) / _ROOM_FOR_SQUARES


def _plus_shared(total: Any, call: _ClipCall, shared: list[SharedLeaf], lengths: jax.Array) -> Any:
    """Return ``total`` plus the clipped sum of canaries that share their places."""
    leaves, structure = jax.tree.flatten(call.like)
    count = call.clip.multiple * math.ceil(lengths.size / call.clip.multiple)
    rows = [
        jnp.pad((places.values * lengths).T, ((0, count - lengths.size), (0, 0)))
        .reshape(_narrow(leaf, count))
        .astype(leaf.dtype)
        for leaf, places in zip(leaves, shared, strict=True)
    ]
    sums = jax.tree.leaves(call.total(jax.tree.unflatten(structure, rows)))
    joined = [
        jnp.ravel(before).at[places.coordinates].add(jnp.ravel(added), mode="drop").reshape(leaf.shape)
        for before, leaf, places, added in zip(jax.tree.leaves(total), leaves, shared, sums, strict=True)
    ]
    return jax.tree.unflatten(structure, joined)


def _clipped_compact(call: _ClipCall, compact: list[CompactLeaf], lengths: jax.Array, size: int) -> Any:
    """Return the clipped sum of canaries of these lengths, which share no coordinate, ``size`` at a time."""
    leaves, structure = jax.tree.flatten(call.like)

    def clipped(chunk: Any) -> list[jax.Array]:
        rows = [
            _matrix(entries.values * lengths[entries.numbers], entries.numbers % size, size)
            .reshape(_narrow(leaf, size))
            .astype(leaf.dtype)
            for leaf, entries in zip(leaves, chunk, strict=True)
        ]
        total = call.total(jax.tree.unflatten(structure, rows))
        return [jnp.ravel(leaf) for leaf in jax.tree.leaves(total)]

    if len(compact[0].values) > 1 and isinstance(lengths, jax.core.Tracer):  # otherwise compiled in each step
        sums = jax.lax.scan(lambda _, chunk: (None, clipped(chunk)), None, compact)[1]
    else:
        chunks = [[leaf.chunk(number) for leaf in compact] for number in range(len(compact[0].values))]
        sums = [jnp.stack(totals) for totals in zip(*map(clipped, chunks), strict=True)]
    placed = [
        jnp.zeros(leaf.size, total.dtype).at[entries.coordinates].add(total, mode="drop").reshape(leaf.shape)
        for leaf, entries, total in zip(leaves, compact, sums, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def _matrix(values: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """Return a matrix whose columns have one value each, in these rows."""
    return jnp.where(jnp.arange(num_rows)[:, None] == rows[None, :], values[None, :], 0.0)


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

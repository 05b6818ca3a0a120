"""Canaries, inserted between the clipping and the noise of a step.

:class:`JaxObserver` wraps a gradient function and a privatizer. An :class:`Insertion` adds canaries and
scores them in a release: gradient canaries here, input canaries in ``_input_observer``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.clipping import BoundedSensitivityCallable

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.canaries import CanaryPlan, Directions, GradientCanary, ParameterLayout
from dpaudit.errors import InputError
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
from dpaudit.observers.jax_privacy._host import Host, precision_of, shape_of
from dpaudit.recording import ObservedCanaries

_CHUNK_ENTRIES = 2**24  # matrix entries of canary rows that are in memory together
_COMPACT_CHUNK = 128  # Dirac canaries to clip together on their own coordinates
_DEFAULT_NUM_CANARIES, _FEW = 1024, 64  # if there are as many parameters; if canaries need full rows
_ROOM_FOR_SQUARES = 16.0  # between the square root of the largest number and the longest canary
_TURNED = (
    "clipping changes the direction of canaries, so that they are not subtracted completely and the weights "
    "differ from those without the audit"
)
_TOLERANCE = 1e-4  # orders of magnitude above the rounding error of sums and below the noise


class Insertion(Protocol):
    """Canaries of one kind; both methods are called inside compiled code."""

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        """Return ``total``, the sum computed from these arguments, plus the canaries of this step.

        ``measured`` is to be passed to :meth:`Host.add_pending`.
        """

    def subtract(self, arrived: Any, released: Any) -> Any:
        """Score the canaries in ``released``; return ``arrived``, the sum before noise, without them."""


class JaxObserver:
    """An observer that adds canaries to the clipped sum and subtracts them after the noise."""

    def __init__(self, host: Host, insertion: Insertion, max_grad_norm: float | None = None) -> None:
        self._host, self._insertion = host, insertion
        self._given = None if max_grad_norm is None else _validate.positive("max_grad_norm", max_grad_norm)
        host.scale.free = max_grad_norm is not None
        self._shapes: list[tuple[int, ...]] | None = None
        self._first: ParameterLayout | None = None  # on which the canaries are laid out

    def gradient(self, grad_fn: Any) -> BoundedSensitivityCallable:
        """Return a function like ``grad_fn`` whose returned sum contains canaries."""
        clip = JaxClip(grad_fn)
        bound = self._given or clip.bound
        if not 0 < bound < math.inf:
            raise InputError(
                f"Expected a finite clipping norm, got {bound:g}: pass max_grad_norm=... instead."
            )
        self._host.norm, self._host.bound = bound, clip.bound

        def observed(*args: Any, **kwargs: Any) -> Any:
            result = grad_fn(*args, **kwargs)
            total = result[0] if clip.has_aux else result
            self._shapes = _shapes(total)
            self._require_same(layout_of(total, math.inf))
            measured = self._host.with_sample(clip.measured(args, kwargs, total), total)
            digests = clip.digests(args, kwargs) if self._host.tests_rows else ()
            joined = self._insertion.join(clip, args, total, (measured, digests))
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

    def _require_same(self, found: ParameterLayout) -> None:
        """Raise if the gradient has other parameters than in the first step, as after unfreezing."""
        self._first = first = self._first or found
        if (found.names, found.shapes) == (first.names, first.shapes):
            return
        raise InputError(
            f"Expected gradients with {first.num_parameters:,} entries in every step, in the same "
            f"{len(first.names)} arrays, got {found.num_parameters:,} in {len(found.names)} arrays: were "
            "layers frozen or unfrozen? Call observe() once for each phase of the training run, after the "
            "change."
        )

    def _require_like(self, gradient: Any) -> None:
        if self._shapes is None:
            raise InputError(
                "Expected the gradient function returned by observe() to be called before the update of the "
                "privatizer, but it was not."
            )
        if _shapes(gradient) != self._shapes:
            raise InputError(
                f"Expected a gradient of shapes {self._shapes}, as returned by clipped_grad, got "
                f"{_shapes(gradient)}."
            )


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]


class GradientInsertion:
    """Gradient canaries, which pass only through the library's clipping."""

    def __init__(self, host: Host, canary: GradientCanary, num_canaries: int | None, seed: int) -> None:
        if canary.moving and canary.num_variants > 1:
            raise InputError(f"Expected canaries that do not move, got {canary!r}: pass moving=False.")
        self._host, self._canary, self._seed = host, canary, seed
        self._layout: ParameterLayout | None = None
        self._plans: CanaryPlans | None = None
        self._draws = CanaryPlan(canary, _FEW if num_canaries is None else num_canaries, seed)
        host.draws = None if num_canaries is None else self._draws

    @property
    def layout(self) -> ParameterLayout:
        """The named parameters of a gradient, known after the first call of the gradient function."""
        assert self._layout is not None
        return self._layout

    @property
    def precision(self) -> float:
        """The relative precision of gradients."""
        return self._host.precision

    def directions(self, index: int) -> Directions:
        """Return the directions of a step's canaries."""
        assert self._plans is not None
        return self._plans.directions(index)

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        if self._host.draws is None:  # before the first step
            limit = _FEW if clip.needs_full_rows or self._canary.moving else _DEFAULT_NUM_CANARIES
            # a resumed run has as many canaries as before
            fitting = max(1, num_entries(total) // self._canary.places_per_canary)
            count = self._host.scores_per_step or min(limit, fitting)
            self._draws = CanaryPlan(self._canary, count, self._seed)
            self._host.draws = self._draws
        norm = clip.norm(self._host.norm)
        if self._layout is None:
            self._layout = layout_of(total, _longest(total) / norm)
            self._plans = CanaryPlans(self._draws, self._layout)
        vectors, variant = self._vectors(num_entries(total))
        lengths = norm * self._plans_made.lengths(variant) * self._host.joins()
        canaries = self._clipped(_ClipCall(clip, args, total), vectors, lengths, variant)
        joined = jax.tree.map(jnp.add, total, canaries)
        strays = _strays(vectors, flat(canaries), tolerance_of(total))
        batch, both = vectors.project(flat(total)), vectors.project(flat(joined))
        self._host.call(self._note, None, batch, both, *strays, measured)
        return joined

    @property
    def _plans_made(self) -> CanaryPlans:
        assert self._plans is not None  # since the first call of the gradient function
        return self._plans

    def _clipped(self, call: _ClipCall, vectors: JaxCanaryVectors, lengths: jax.Array, variant: Any) -> Any:
        """Return the clipped sum of canaries of these lengths."""
        clip = call.clip
        if clip.needs_full_rows or self._canary.moving:  # whose coordinates are not known yet
            return _clipped_rows(call, vectors, lengths)
        size = max(1, round(_COMPACT_CHUNK / math.sqrt(len(vectors.values))))
        size = clip.multiple * math.ceil(min(size, vectors.num_apart) / clip.multiple)
        apart, shared = self._plans_made.compact(variant, size)
        total = _clipped_compact(call, apart, lengths[: vectors.num_apart], size)
        if shared is None:
            return total
        return _plus_shared(total, call, shared, lengths[vectors.num_apart :])

    def _note(self, batch: Any, joined: Any, outside: Any, inside: Any, measured: Any) -> None:
        if inside and not outside and self._canary.num_variants > 1:  # what arrives is tested
            self._host.note_not_covered(_TURNED)
        elif outside or inside:
            raise InputError(
                "Expected a gradient function that only clips, scales and sums, got one that also adds other "
                "terms or changes directions, which cannot be distinguished from canaries: apply these after "
                "the noise."
            )
        self._host.add_pending(batch, joined, measured)

    def subtract(self, arrived: Any, released: Any) -> Any:
        vectors, _ = self._vectors(num_entries(arrived))
        products, given = (vectors.project(flat(tree)) for tree in (released, arrived))
        noisy = self._host.sampled(released, arrived)
        room = np.float32(tolerance_of(arrived))
        inserted = self._host.call(self._release, shape_of(products), products, given, *noisy, room)
        return jax.tree.map(jnp.subtract, arrived, unflat(vectors.weighted_sum(inserted), arrived))

    def _release(self, products: Any, arrived: Any, after: Any, before: Any, tolerance: Any) -> FloatArray:
        """Keep the scores of a release; return the contribution of the canaries to the sum ``arrived``."""
        pending, scale = self._host.pop_pending(arrived, tolerance)
        scores = (np.asarray(products, np.float64) - scale * pending.batch) / self._host.norm
        self._host.keep(scores, after, before)
        return (scale * pending.inserted).astype(np.float32)

    def _vectors(self, num_parameters: int) -> tuple[JaxCanaryVectors, Any]:
        """Return the directions of this step's canaries and their variant; called inside compiled code."""
        plans = self._plans_made
        if self._canary.moving:
            first = plans.vectors(0)
            shapes = jax.tree.map(shape_of, (first.values, first.coordinates))
            values, coordinates = self._host.call(self._moved, shapes)
            return JaxCanaryVectors(values, coordinates, num_parameters), 0
        variant: Any = 0
        if self._canary.num_variants > 1:
            variant = self._host.call(self._variant, shape_of(np.zeros((), np.int32)))
        return plans.vectors(variant), variant

    def _variant(self) -> np.ndarray:
        return np.asarray(self._canary.variant(self._host.step), np.int32)

    def _moved(self) -> tuple[Any, Any]:
        found = JaxCanaryVectors.of(self._draws.directions(self._host.step, self.layout))
        return found.values, found.coordinates


def observed_canaries(canary: GradientCanary, insertion: Callable[[], Any]) -> ObservedCanaries:
    """Return the canaries that an insertion, which is set up later, will add, for tests of what arrives."""
    return ObservedCanaries(
        canary,
        lambda index: insertion().directions(index),
        lambda: insertion().layout,
        lambda: insertion().precision,
    )


class CanaryPlans:
    """All sets of directions that steps take in turn, in arrays from which compiled code selects one."""

    def __init__(self, draws: CanaryPlan, layout: ParameterLayout) -> None:
        self._draws, self._layout = draws, layout
        count = 1 if draws.canary.moving else draws.canary.num_variants
        self._directions = [draws.directions(variant, layout) for variant in range(count)]
        self._each = [JaxCanaryVectors.of(one) for one in self._directions]
        self._lengths = np.stack([draws.canary.lengths(one) for one in self._directions]).astype(np.float32)
        self._arrays = stacked([(one.values, one.coordinates, one.places, one.shared) for one in self._each])
        self._compact: dict[int, Any] = {}

    def directions(self, index: int) -> Directions:
        """Return the directions of a step's canaries."""
        if self._draws.canary.moving:
            return self._draws.directions(index, self._layout)
        return self._directions[self._draws.canary.variant(index)]

    def vectors(self, variant: Any) -> JaxCanaryVectors:
        """Return one set of directions."""
        if len(self._each) == 1:
            return self._each[0]
        values, coordinates, places, shared = jax.tree.map(
            lambda one: jnp.asarray(one)[variant], self._arrays
        )
        return JaxCanaryVectors(values, coordinates, self._layout.num_parameters, places, shared)

    def lengths(self, variant: Any) -> Any:
        """Return the norm of each canary in clipping norms."""
        return self._lengths[0] if len(self._each) == 1 else jnp.asarray(self._lengths)[variant]

    def compact(self, variant: Any, chunk: int) -> tuple[list[CompactLeaf], list[SharedLeaf] | None]:
        """Return the entries of one set in each leaf, for chunks of this many canaries."""
        if chunk not in self._compact:
            sizes = [int(size) for size in self._layout.sizes]
            apart = [CompactLeaf.of(one, sizes, chunk) for one in self._each]
            shared = [SharedLeaf.of(one, sizes) for one in self._each if one.shared is not None]
            # padding has a coordinate past the last one of its leaf
            self._compact[chunk] = [
                [stacked([one[i] for one in variants], size) for i, size in enumerate(sizes)]
                for variants in (apart, shared)
                if variants
            ]
        chosen = jax.tree.map(
            lambda one: one[0] if len(self._each) == 1 else jnp.asarray(one)[variant], self._compact[chunk]
        )
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
        jnp.pad((own.values * lengths).T, ((0, count - lengths.size), (0, 0)))
        .reshape(_narrow(leaf, count))
        .astype(leaf.dtype)
        for leaf, own in zip(leaves, shared, strict=True)
    ]
    sums = jax.tree.leaves(call.total(jax.tree.unflatten(structure, rows)))
    parts = [
        jnp.ravel(before).at[own.coordinates].add(jnp.ravel(part), mode="drop").reshape(leaf.shape)
        for before, leaf, own, part in zip(jax.tree.leaves(total), leaves, shared, sums, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def _clipped_compact(call: _ClipCall, compact: list[CompactLeaf], lengths: jax.Array, size: int) -> Any:
    """Return the clipped sum of canaries of these lengths, which share no coordinate, ``size`` at a time."""
    leaves, structure = jax.tree.flatten(call.like)

    def clipped(chunk: Any) -> list[jax.Array]:
        rows = [
            _matrix(own.values * lengths[own.numbers], own.numbers % size, size)
            .reshape(_narrow(leaf, size))
            .astype(leaf.dtype)
            for leaf, own in zip(leaves, chunk, strict=True)
        ]
        total = call.total(jax.tree.unflatten(structure, rows))
        return [jnp.ravel(part) for part in jax.tree.leaves(total)]

    if len(compact[0].values) > 1 and isinstance(lengths, jax.core.Tracer):  # otherwise compiled in each step
        sums = jax.lax.scan(lambda _, chunk: (None, clipped(chunk)), None, compact)[1]
    else:
        chunks = [[leaf.chunk(number) for leaf in compact] for number in range(len(compact[0].values))]
        sums = [jnp.stack(parts) for parts in zip(*map(clipped, chunks), strict=True)]
    parts = [
        jnp.zeros(leaf.size, total.dtype).at[own.coordinates].add(total, mode="drop").reshape(leaf.shape)
        for leaf, own, total in zip(leaves, compact, sums, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


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

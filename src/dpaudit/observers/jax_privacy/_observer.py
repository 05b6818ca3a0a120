"""Canaries, inserted between the clipping and the noise of a step.

:class:`JaxObserver` wraps a gradient function and a privatizer. An :class:`Insertion` adds canaries and
scores them in a release: gradient canaries here, input canaries in ``_input_observer``.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.clipping import BoundedSensitivityCallable

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.canaries import Draws, GradientCanary
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import CompactLeaf, JaxCanaryVectors, flat, unflat
from dpaudit.observers.jax_privacy._clipping import JaxClip, marked
from dpaudit.observers.jax_privacy._host import Host, precision_of, shape_of

_CHUNK_ENTRIES = 2**24  # matrix entries of canary rows that are in memory together
_COMPACT_CHUNK = 128  # Dirac canaries to clip together on their own coordinates
_DEFAULT_NUM_CANARIES, _FEW = 1024, 64  # if there are as many parameters; if canaries need full rows
_TOLERANCE = 1e-4  # orders of magnitude above the rounding error of sums and below the noise


class Insertion(Protocol):
    """Canaries of one kind; both methods are called inside compiled code."""

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        """Return ``total``, the sum computed from these arguments, plus the canaries of this step.

        ``measured`` is what :meth:`JaxClip.measured` returns, to be passed to the host.
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
            joined = self._insertion.join(clip, args, total, clip.measured(args, kwargs, total))
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
        self._host, self._canary, self._seed = host, canary, seed
        self._vectors: JaxCanaryVectors | None = None
        self._draws = Draws(canary, _FEW if num_canaries is None else num_canaries, seed)
        host.draws = None if num_canaries is None else self._draws

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        if self._host.draws is None:  # before the first step
            limit = _FEW if clip.needs_full_rows or self._canary.moving else _DEFAULT_NUM_CANARIES
            # a resumed run has as many canaries as before
            count = self._host.scores_per_step or min(limit, num_entries(total))
            self._draws = Draws(self._canary, count, self._seed)
            self._host.draws = self._draws
        length = self._canary.scale * clip.norm(self._host.norm)
        vectors = self._directions(num_entries(total))
        lengths = length * self._host.joins()
        canaries = _clipped(clip, args, total, vectors, lengths)
        joined = jax.tree.map(jnp.add, total, canaries)
        stray = _has_strays(vectors, flat(canaries), tolerance_of(total))
        batch, both = vectors.project(flat(total)), vectors.project(flat(joined))
        self._host.call(self._note, None, batch, both, stray, measured)
        return joined

    def _note(self, batch: Any, joined: Any, stray: Any, measured: Any) -> None:
        if stray:
            raise InputError(
                "Expected a gradient function that only clips, scales and sums, got one that also adds other "
                "terms or changes directions, which cannot be distinguished from canaries: apply these after "
                "the noise."
            )
        self._host.add_pending(batch, joined, measured)

    def subtract(self, arrived: Any, released: Any) -> Any:
        vectors = self._directions(num_entries(arrived))
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

    def _directions(self, num_parameters: int) -> JaxCanaryVectors:
        """Return the directions of this step's canaries; called inside compiled code."""
        if self._vectors is None:
            self._vectors = JaxCanaryVectors.of(self._draws.directions(0, num_parameters))
        if num_parameters != self._vectors.num_parameters:
            raise InputError(
                f"Expected gradients with {self._vectors.num_parameters} entries in every step, got "
                f"{num_parameters}."
            )
        if not self._canary.moving:
            return self._vectors
        shapes = jax.tree.map(shape_of, (self._vectors.values, self._vectors.coordinates))
        values, coordinates = self._host.call(self._moved, shapes)
        return JaxCanaryVectors(values, coordinates, num_parameters)

    def _moved(self) -> tuple[Any, Any]:
        assert self._vectors is not None
        found = JaxCanaryVectors.of(self._draws.directions(self._host.step, self._vectors.num_parameters))
        return found.values, found.coordinates


def num_entries(tree: Any) -> int:
    """Return the number of entries of a gradient."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def tolerance_of(tree: Any) -> float:
    """Return the largest relative difference that rounding may cause between two ways to compute a sum."""
    return max(_TOLERANCE, 4 * precision_of(tree))


def _clipped(
    clip: JaxClip, args: tuple[Any, ...], like: Any, vectors: JaxCanaryVectors, lengths: jax.Array
) -> Any:
    """Return the clipped sum of canaries of these lengths."""
    if clip.needs_full_rows or isinstance(vectors.values, jax.Array):  # whose coordinates are not known yet
        return _clipped_rows(clip, args, like, vectors, lengths)
    size = max(1, round(_COMPACT_CHUNK / math.sqrt(len(vectors.values))))
    size = clip.multiple * math.ceil(min(size, vectors.num_canaries) / clip.multiple)
    leaves, structure = jax.tree.flatten(like)
    compact = CompactLeaf.of(vectors, [leaf.size for leaf in leaves], size)

    def clipped(chunk: Any) -> list[jax.Array]:
        rows = [
            _matrix(own.values * lengths[own.numbers], own.numbers % size, size)
            .reshape(_narrow(leaf, size))
            .astype(leaf.dtype)
            for leaf, own in zip(leaves, chunk, strict=True)
        ]
        total = clip.total(args, jax.tree.unflatten(structure, rows))
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


def _clipped_rows(
    clip: JaxClip, args: tuple[Any, ...], like: Any, vectors: JaxCanaryVectors, lengths: jax.Array
) -> Any:
    """Return the clipped sum of canaries, from rows with an entry for each parameter."""

    def clipped(numbers: jax.Array) -> Any:
        inside = jnp.minimum(numbers, vectors.num_canaries - 1)
        rows = vectors.rows(inside, jnp.where(numbers == inside, lengths[inside], 0.0))
        return clip.total(args, unflat(rows, like))

    chunks = _chunks(vectors, clip.multiple)
    first = clipped(chunks[0])
    if len(chunks) == 1:
        return first
    add = lambda total, chunk: (jax.tree.map(jnp.add, total, clipped(chunk)), None)  # noqa: E731
    return jax.lax.scan(add, first, chunks[1:])[0]


def _has_strays(vectors: JaxCanaryVectors, canaries: jax.Array, tolerance: float) -> jax.Array:
    """Return whether a sum of canaries is not a linear combination of them."""
    strays = jnp.abs(canaries - vectors.weighted_sum(vectors.project(canaries)))
    return jnp.max(strays) > tolerance * jnp.max(jnp.abs(canaries))


def _chunks(vectors: JaxCanaryVectors, multiple: int) -> jax.Array:
    """Return canary numbers, as many per row as fit in memory; numbers past the last canary are padding."""
    fitting = max(1, _CHUNK_ENTRIES // vectors.num_parameters)
    size = multiple * math.ceil(min(fitting, vectors.num_canaries) / multiple)
    return jnp.arange(size * math.ceil(vectors.num_canaries / size)).reshape(-1, size)

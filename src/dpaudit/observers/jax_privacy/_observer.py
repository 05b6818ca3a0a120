"""Canaries between the clipping and the noise of a step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax_privacy.clipping import BoundedSensitivityCallable

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import Vectors, flat, unflat
from dpaudit.observers.jax_privacy._clipping import Clip, marked
from dpaudit.observers.jax_privacy._host import Host
from dpaudit.recording import CoordinateSample

Join: TypeAlias = Callable[[tuple[Any, ...], Any], Any]
"""From the arguments of a call and the sum that it returned to the sum with canaries."""

_AT_ONCE = 2**24  # numbers of canaries' gradients that are in memory together
_TOLERANCE = 1e-4  # some orders above the rounding of sums, some below what noise would hide


class Observer:
    """Lets canaries join the clipped sum of a gradient function, and takes them off after the noise."""

    def __init__(self, host: Host, max_grad_norm: float | None = None) -> None:
        self._host = host
        self._given = None if max_grad_norm is None else _validate.positive("max_grad_norm", max_grad_norm)
        host.scale.free = max_grad_norm is not None
        self._shapes: list[tuple[int, ...]] | None = None

    @property
    def norm(self) -> float:
        """What one example may add to the sum."""
        return self._host.norm

    def gradient(self, grad_fn: Any) -> BoundedSensitivityCallable:
        """The same function; the sum that it returns has canaries in it."""
        clip = Clip(grad_fn)
        bound = self._given or clip.bound
        if not 0 < bound < math.inf:
            raise InputError(f"Expected a finite clipping norm, got {bound:g}: pass max_grad_norm=...")
        self._host.norm = bound
        join = self._joining(clip)

        def observed(*args: Any, **kwargs: Any) -> Any:
            result = grad_fn(*args, **kwargs)
            total = result[0] if clip.has_aux else result
            self._shapes = _shapes(total)
            joined = join(args, total)
            return (joined, *result[1:]) if clip.has_aux else joined

        return BoundedSensitivityCallable(marked(observed), clip.bound, clip.has_aux)

    def _joining(self, clip: Clip) -> Join:
        """The function that lets canaries join a sum."""
        length = self._host.draws.canary.scale * clip.norm(self.norm)
        return lambda args, total: self._joined(clip, args, total, length)

    def _joined(self, clip: Clip, args: tuple[Any, ...], total: Any, length: float) -> Any:
        """The sum with the canaries of this step."""
        vectors = self._host.directions(sum(leaf.size for leaf in jax.tree.leaves(total)))
        lengths = length * self._host.joins(vectors.num_canaries)
        canaries = _clipped(clip, args, total, vectors, lengths)
        joined = jax.tree.map(jnp.add, total, canaries)
        stray = _has_strays(vectors, flat(canaries), tolerance_of(total))
        self._host.note(vectors.project(flat(total)), vectors.project(flat(joined)), stray)
        return joined

    def privatizer(self, privatizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """The same transformation; what it returns has no canaries in it.

        It is called twice with the same state: a release with canaries is scored, and one without them is
        returned. They have the same noise, and whatever else is done in there is right for both.
        """
        signature = inspect.signature(privatizer.update)

        def update(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            name, arrived = next(iter(call.arguments.items()))
            self._require_like(arrived)
            released, _ = privatizer.update(*call.args, **call.kwargs)
            self._require_like(released)
            call.arguments[name] = self._without(arrived, released)
            return privatizer.update(*call.args, **call.kwargs)

        return privatizer._replace(update=marked(update))

    def _without(self, arrived: Any, released: Any) -> Any:
        """What arrived, but for the canaries, which are scored by what was released for it."""
        vectors = self._host.directions(sum(leaf.size for leaf in jax.tree.leaves(arrived)))
        seen, given = (vectors.project(flat(tree)) for tree in (released, arrived))
        noisy = self._noisy(released, arrived)
        off = vectors.spread(self._host.release(seen, given, noisy, tolerance_of(arrived)))
        return jax.tree.map(jnp.subtract, arrived, unflat(off, arrived))

    def _noisy(self, released: Any, arrived: Any) -> tuple[jax.Array, jax.Array]:
        """What came out of the privatizer, and what went in, where noise is looked at."""
        places = CoordinateSample.of([leaf.size for leaf in jax.tree.leaves(arrived)])
        self._host.leaves, self._host.precision = places.leaves, _precision(arrived)
        return flat(released)[places.indices], flat(arrived)[places.indices]

    def _require_like(self, gradient: Any) -> None:
        if self._shapes is None:
            raise InputError(
                "Expected the gradient function of observe() to be called before the privatizer is updated; "
                "it was not."
            )
        if _shapes(gradient) != self._shapes:
            raise InputError(
                f"Expected a gradient of shapes {self._shapes}, as clipped_grad returned it, got "
                f"{_shapes(gradient)}."
            )


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]


def tolerance_of(tree: Any) -> float:
    """By how much, of the largest, two ways to compute the same may differ."""
    return max(_TOLERANCE, 4 * _precision(tree))


def _precision(tree: Any) -> float:
    """The relative precision of the coarsest leaf."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))  # type: ignore[no-untyped-call]


def _clipped(clip: Clip, args: tuple[Any, ...], like: Any, vectors: Vectors, lengths: jax.Array) -> Any:
    """What the clipping leaves of canaries of these lengths, added up."""

    def clipped(numbers: jax.Array) -> Any:
        inside = jnp.minimum(numbers, vectors.num_canaries - 1)
        rows = vectors.rows(inside, jnp.where(numbers == inside, lengths[inside], 0.0))
        return clip.total(args, unflat(rows, like))

    return _added(clipped, _chunks(vectors, clip.multiple))


def _has_strays(vectors: Vectors, canaries: jax.Array, tolerance: float) -> jax.Array:
    """Whether there is more in a sum of canaries than multiples of them."""
    strays = jnp.abs(canaries - vectors.spread(vectors.project(canaries)))
    return jnp.max(strays) > tolerance * jnp.max(jnp.abs(canaries))


def _chunks(vectors: Vectors, multiple: int) -> jax.Array:
    """Numbers of canaries, as many a row as fit into memory; past the last canary there is none."""
    fitting = max(1, _AT_ONCE // vectors.num_parameters)
    size = multiple * math.ceil(min(fitting, vectors.num_canaries) / multiple)
    return jnp.arange(size * math.ceil(vectors.num_canaries / size)).reshape(-1, size)


def _added(function: Any, chunks: jax.Array) -> Any:
    """The sum of what ``function`` returns for each of the chunks."""
    first = function(chunks[0])
    if len(chunks) == 1:
        return first
    add = lambda total, chunk: (jax.tree.map(jnp.add, total, function(chunk)), None)  # noqa: E731
    return jax.lax.scan(add, first, chunks[1:])[0]

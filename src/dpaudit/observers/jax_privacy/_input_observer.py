"""Input canaries, inserted between the loss and the noise of a step.

The library's own code computes, clips and sums the gradients of an :class:`InputInsertion`. A canary is
scored along its gradient at the weights of the step.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpaudit._types import FloatArray
from dpaudit.canaries import CanaryCoins, InputCanary
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import HeldOutArrays, first_examples, flat, unflat
from dpaudit.observers.jax_privacy._clipping import JaxClip
from dpaudit.observers.jax_privacy._crafting import JaxCrafting
from dpaudit.observers.jax_privacy._observer import num_entries, tolerance_of
from dpaudit.observers.jax_privacy._step_callbacks import NO_GRADIENT, StepCallbacks, shape_of

_CRAFTING = 4  # purpose of a random stream, besides those of CanaryPlan
_HINT = "does the model have that many classes? Set their number with num_classes of hold_out()."
_DIRECTION_TOLERANCE = 1e-3  # between unit vectors that are the same up to rounding
_MIN_NORM = 1e-12  # in clipping norms: a shorter gradient has no direction to score along


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CanaryDirections:
    """The directions along which a release is scored, and the contributions of the canaries."""

    directions: Any  # canaries x parameters; unit vectors, or zeros where a gradient is too short
    lengths: Any  # the largest contribution of each canary, on the scale of the noise
    others: Any  # the contribution of the other canaries along each canary
    inserted: Any  # the contribution of all canaries
    losses: Any  # one per canary


class InputInsertion:
    """Input canaries, which also pass through the loss.

    A score is the component of the release along the canary's gradient, without the batch and the other
    canaries, divided by the largest contribution of the canary: 1 if it is present, more if it was not
    clipped. Examples are kept between steps, and their directions between a gradient and its release.
    """

    def __init__(
        self, callbacks: StepCallbacks, coins: CanaryCoins, canary: InputCanary, data: HeldOutArrays | None
    ) -> None:
        self._callbacks, self._coins, self._canary, self._data = callbacks, coins, canary, data
        self._examples = self._first_examples(0)
        self._made_at: int | None = None
        self._along: CanaryDirections | None = None

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        inputs, rows, losses = self._gradients(clip, args)
        joins = self._callbacks.presence(self._coins)
        summed = partial(_summed, clip=clip, args=args, like=total)
        together = summed(rows * joins[:, None])
        alone = jax.lax.map(lambda row: flat(summed(row[None])), rows)
        joined = jax.tree.map(jnp.add, total, together)
        norms = clip.norm(self._callbacks.norm), self._callbacks.norm
        along = _directions(rows, alone, joins, flat(together), norms=norms)
        along = replace(along, losses=losses)
        off = jnp.max(jnp.abs(along.inserted - joins @ alone))
        stray = off > tolerance_of(total) * jnp.max(jnp.abs(alone))
        batch, both = (along.directions @ flat(tree) for tree in (total, joined))
        self._callbacks.call(self._note_inputs, None, inputs, (batch, both, measured), stray, along)
        return joined

    def _gradients(self, clip: JaxClip, args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the inputs of this step's canaries, their gradients before clipping, and their losses."""
        shapes = jax.tree.map(shape_of, (np.zeros((), np.bool_), *self._examples))
        is_due, inputs, targets = self._callbacks.call(self._current_examples, shapes)
        loss = partial(clip.loss, args)

        def gradient(example: Any, target: Any) -> jax.Array:
            return flat(clip.gradient(args, example, target))

        if self._canary.uses_weights:
            assert self._data is not None  # required for this canary
            crafting = JaxCrafting(
                data=self._data, loss=loss, gradient=gradient, max_grad_norm=clip.norm(self._callbacks.norm)
            )
            craft = partial(crafting, self._canary)
            inputs = jax.lax.cond(is_due, craft, lambda start, _: start, inputs, targets)
        return inputs, jax.vmap(gradient)(inputs, targets), jax.vmap(loss)(inputs, targets)

    def _current_examples(self) -> tuple[Any, ...]:
        """Return whether to craft canaries in this step, and their inputs and classes."""
        index = self._callbacks.step
        is_due = self._canary.is_due(index, self._made_at)
        if is_due:
            self._examples, self._made_at = self._first_examples(index), index
        return np.bool_(is_due), *self._examples

    def _first_examples(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = self._coins.rng(index, _CRAFTING)
        examples = first_examples(self._canary, self._data, self._coins.num_canaries, rng)
        # only NumPy: callbacks from compiled code must not use JAX, which would deadlock
        inputs, targets = (array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) for array in examples)
        return inputs, targets

    def _note_inputs(self, inputs: Any, sums: Any, stray: Any, along: CanaryDirections) -> None:
        """Keep the projections of a gradient with and without canaries, and the crafted inputs."""
        self._examples = np.asarray(inputs), self._examples[1]
        if stray:
            raise InputError(
                "Expected a gradient function that clips each example separately, got one whose sum of all "
                "canaries differs from the sum one by one: examples affect each other."
            )
        self._callbacks.add_pending(*sums)
        if self._callbacks.step == 0:
            self._check_first(np.asarray(along.losses), np.asarray(along.directions))
        if self._along is None:
            self._along = jax.tree.map(np.asarray, along)
        elif np.abs(np.asarray(along.directions) - self._along.directions).max() > _DIRECTION_TOLERANCE:
            raise InputError(
                "Expected all gradients of one step to be computed at the same weights, got different ones."
            )

    def _check_first(self, losses: np.ndarray, directions: np.ndarray) -> None:
        """Raise or warn if a canary reveals nothing at the initial weights; later, training may diverge."""
        is_silent = ~directions.any(axis=1)
        lost, silent = (
            np.unique(self._examples[1][what]).tolist() for what in (~np.isfinite(losses), is_silent)
        )
        if lost:
            raise InputError(
                f"Expected canaries with a finite loss, got an infinite or NaN loss for classes {lost}: "
                f"{_HINT}"
            )
        if silent:
            warnings.warn(
                f"{is_silent.sum()} of {len(losses)} canaries, of classes {silent}, have zero gradients and "
                f"reveal nothing: {_HINT}",
                stacklevel=2,
            )

    def subtract(self, arrived: Any, released: Any) -> Any:
        count, size = self._coins.num_canaries, num_entries(arrived)
        shapes = np.zeros((count, size), np.float32), np.zeros(size, np.float32)
        directions, inserted = self._callbacks.call(self._current_directions, jax.tree.map(shape_of, shapes))
        after, before = (directions @ flat(tree) for tree in (released, arrived))
        sampled = self._callbacks.sample_release(released, arrived)
        room = np.float32(tolerance_of(arrived))
        scale = self._callbacks.call(self._release, shape_of(after), after, before, sampled, room)[0]
        return jax.tree.map(jnp.subtract, arrived, unflat(scale * inserted, arrived))

    def _current_directions(self) -> tuple[Any, Any]:
        if self._along is None:
            raise InputError(NO_GRADIENT)
        return self._along.directions, self._along.inserted

    def _release(self, products: Any, arrived: Any, sampled: Any, tolerance: Any) -> FloatArray:
        """Keep the scores of a release; return the factor by which the loop multiplied the sum."""
        along, self._along = self._along, None
        pending, scale = self._callbacks.take_pending(arrived, tolerance)
        assert along is not None  # _current_directions comes first
        others = scale * (pending.batch + np.asarray(along.others, np.float64))
        scores = (np.asarray(products, np.float64) - others) / along.lengths
        lengths = np.where(np.any(along.directions, axis=1), along.lengths / self._callbacks.norm, 0.0)
        self._callbacks.finish_release(scores, pending, scale, sampled, lengths=lengths)
        return np.full_like(products, scale)


def _summed(rows: jax.Array, *, clip: JaxClip, args: Any, like: Any) -> Any:
    """Return the clipped sum of these gradients, computed by the library; zeros pad a microbatch."""
    missing = math.ceil(len(rows) / clip.multiple) * clip.multiple - len(rows)
    return clip.total(args, unflat(jnp.pad(rows, ((0, missing), (0, 0))), like))


def _directions(
    rows: Any, alone: Any, joins: Any, inserted: Any, *, norms: tuple[float, float]
) -> CanaryDirections:
    """Return the directions along which canaries with these gradients are scored.

    ``norms`` are the clipping norm and the largest contribution of one example to the sum.
    """
    clip_norm, most = norms
    row_norms = jnp.linalg.norm(rows, axis=1)
    is_usable = jnp.isfinite(row_norms) & (row_norms > _MIN_NORM * clip_norm)
    directions = jnp.where(is_usable[:, None], rows / jnp.where(is_usable, row_norms, 1.0)[:, None], 0.0)
    lengths = jnp.where(is_usable, jnp.minimum(row_norms / clip_norm, 1.0) * most, 1.0)
    along_itself = joins * jnp.sum(directions * alone, axis=1)
    return CanaryDirections(directions, lengths, directions @ inserted - along_itself, inserted, losses=None)

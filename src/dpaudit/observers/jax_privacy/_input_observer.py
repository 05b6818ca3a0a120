"""Examples as canaries between the loss and the noise of a step.

What happens outside of compiled code with canaries that are examples.
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
from dpaudit.canaries import Coins, InputCanary
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import HeldOutArrays, first_examples, flat, unflat
from dpaudit.observers.jax_privacy._clipping import Clip
from dpaudit.observers.jax_privacy._crafting import Crafting
from dpaudit.observers.jax_privacy._host import Host, StepBarrier, shape_of
from dpaudit.observers.jax_privacy._observer import Join, Observer, tolerance_of
from dpaudit.recording import Recorder

_CRAFTING = 4  # a purpose of chance, besides those of Draws
_MANY = "does the model have so many? num_classes of hold_out() says how many there are."
_ROOM = 1e-3  # by how much two directions of length 1 may differ that are the same


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Seen:
    """What a gradient has of the canaries, and where a release is looked at for them."""

    directions: Any  # canaries x parameters, of length 1, or zeros where nothing can be said
    lengths: Any  # what each canary may add at most, where the noise is
    others: Any  # along each canary, what the other ones added
    inserted: Any  # what all of them added
    losses: Any  # of each canary


class InputHost(Host):
    """Keeps examples between steps, and between a gradient and its release where canaries are looked for."""

    def __init__(
        self,
        recorder: Recorder,
        coins: Coins,
        barrier: StepBarrier,
        canary: InputCanary,
        data: HeldOutArrays | None,
    ) -> None:
        super().__init__(recorder, coins, barrier)
        self.canary, self.data = canary, data
        self._examples = self._first(0)
        self._made_at: int | None = None
        self._seen: Seen | None = None

    def _first(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = self.draws.chance(index, _CRAFTING)
        made = first_examples(self.canary, self.data, self.draws.num_canaries, rng)
        # numpy alone: what is called from compiled code must not compute with jax, which would wait for it
        inputs, targets = (part.astype(jax.dtypes.canonicalize_dtype(part.dtype)) for part in made)
        return inputs, targets

    def examples(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Whether canaries are to be crafted now, and their inputs and classes; inside of compiled code."""
        shapes = jax.tree.map(shape_of, (np.zeros((), np.bool_), *self._examples))
        found: tuple[jax.Array, jax.Array, jax.Array] = self.call(self._now, shapes)
        return found

    def _now(self) -> tuple[Any, ...]:
        index = self._recorder.num_done
        due = self.canary.is_due(index, self._made_at)
        if due:
            self._examples, self._made_at = self._first(index), index
        return np.bool_(due), *self._examples

    def note_inputs(self, inputs: Any, batch: Any, joined: Any, stray: Any, seen: Seen) -> None:
        """Keep what a gradient was with and without canaries, and the inputs that were crafted."""
        self.call(self._note_inputs, None, inputs, batch, joined, stray, seen)

    def _note_inputs(self, inputs: Any, batch: Any, joined: Any, stray: Any, seen: Seen) -> None:
        self._examples = np.asarray(inputs), self._examples[1]
        if stray:
            raise InputError(
                "Expected a gradient function that clips each example by itself, got one that makes another "
                "sum of the canaries together than of each alone: examples act on each other."
            )
        self._note(batch, joined, stray)
        if self._recorder.num_done == 0:
            self._require_told(np.asarray(seen.losses), np.asarray(seen.directions))
        if self._seen is None:
            self._seen = jax.tree.map(np.asarray, seen)
        elif np.abs(np.asarray(seen.directions) - self._seen.directions).max() > _ROOM:
            raise InputError(
                "Expected gradients that are added up to one step to be of the same weights, got others."
            )

    def _require_told(self, losses: np.ndarray, directions: np.ndarray) -> None:
        """At the first weights each canary has to say something; later, a training may have diverged."""
        is_silent = ~directions.any(axis=1)
        lost, silent = (
            np.unique(self._examples[1][what]).tolist() for what in (~np.isfinite(losses), is_silent)
        )
        if lost:
            raise InputError(
                f"Expected canaries that have a loss, got one that is not finite for classes {lost}: {_MANY}"
            )
        if silent:
            warnings.warn(
                f"{is_silent.sum()} of {len(losses)} canaries have gradients of 0, of classes {silent}, and "
                f"say nothing: {_MANY}",
                stacklevel=2,
            )

    def looked_at(self, num_parameters: int) -> tuple[jax.Array, jax.Array]:
        """The directions, and what was inserted; inside of compiled code."""
        count = self.draws.num_canaries
        shapes = np.zeros((count, num_parameters), np.float32), np.zeros(num_parameters, np.float32)
        found: tuple[jax.Array, jax.Array] = self.call(self._looked_at, jax.tree.map(shape_of, shapes))
        return found

    def _looked_at(self) -> tuple[Any, Any]:
        if self._seen is None:
            raise InputError(
                "Expected the gradient function of observe() to be called before each update of the "
                "privatizer; it was not."
            )
        return self._seen.directions, self._seen.inserted

    def _release(self, products: Any, arrived: Any, after: Any, before: Any, tolerance: Any) -> FloatArray:
        """Keep the scores; returns by what the loop multiplied the sum."""
        seen, self._seen = self._seen, None
        pending, scale = self._arrived(arrived, tolerance)
        assert seen is not None  # _looked_at comes first
        known = scale * (pending.batch + np.asarray(seen.others, np.float64))
        self._keep((np.asarray(products, np.float64) - known) / seen.lengths, after, before)
        return np.full_like(products, scale)


_SHORTEST = 1e-12  # in clipping norms: along a gradient that is shorter nothing can be said


class InputObserver(Observer):
    """Lets examples join: the library's own code finds, clips and adds their gradients.

    A canary is looked for along its gradient at the weights of the step. A score is what was released there,
    without the batch and the other canaries, over what the canary may add: 1 where it is, more if it was not
    clipped.
    """

    def __init__(self, host: InputHost, max_grad_norm: float | None = None) -> None:
        super().__init__(host, max_grad_norm)
        self._inputs = host

    def _joining(self, clip: Clip) -> Join:
        return partial(self._join, clip)

    def _join(self, clip: Clip, args: Any, total: Any) -> Any:
        inputs, rows, losses = self._gradients(clip, args)
        joins = self._inputs.joins(len(rows))
        summed = partial(_summed, clip=clip, args=args, like=total)
        together = summed(rows * joins[:, None])
        alone = jax.lax.map(lambda row: flat(summed(row[None])), rows)
        joined = jax.tree.map(jnp.add, total, together)
        seen = _seen(rows, alone, joins, flat(together), norms=(clip.norm(self.norm), self.norm))
        seen = replace(seen, losses=losses)
        off = jnp.max(jnp.abs(seen.inserted - joins @ alone))
        stray = off > tolerance_of(total) * jnp.max(jnp.abs(alone))
        batch, both = (seen.directions @ flat(tree) for tree in (total, joined))
        self._inputs.note_inputs(inputs, batch, both, stray, seen)
        return joined

    def _gradients(self, clip: Clip, args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The inputs of this step's canaries, their gradients before clipping, and their losses."""
        host = self._inputs
        due, inputs, targets = host.examples()

        loss = partial(clip.loss, args)

        def gradient(one: Any, target: Any) -> jax.Array:
            return flat(clip.gradient(args, one, target))

        if host.canary.looks_at_weights:
            assert host.data is not None  # as required
            crafting = Crafting(
                data=host.data,
                loss=loss,
                gradient=gradient,
                max_grad_norm=clip.norm(self.norm),
            )
            make = partial(crafting, host.canary)
            inputs = jax.lax.cond(due, make, lambda start, _: start, inputs, targets)
        return inputs, jax.vmap(gradient)(inputs, targets), jax.vmap(loss)(inputs, targets)

    def _without(self, arrived: Any, released: Any) -> Any:
        size = sum(leaf.size for leaf in jax.tree.leaves(arrived))
        directions, inserted = self._inputs.looked_at(size)
        seen, given = (directions @ flat(tree) for tree in (released, arrived))
        noisy = self._noisy(released, arrived)
        scale = self._inputs.release(seen, given, noisy, tolerance_of(arrived))[0]
        return jax.tree.map(jnp.subtract, arrived, unflat(scale * inserted, arrived))


def _summed(rows: jax.Array, *, clip: Clip, args: Any, like: Any) -> Any:
    """The clipped sum of these gradients, by the library; zeros fill up a microbatch."""
    missing = math.ceil(len(rows) / clip.multiple) * clip.multiple - len(rows)
    return clip.total(args, unflat(jnp.pad(rows, ((0, missing), (0, 0))), like))


def _seen(rows: Any, alone: Any, joins: Any, inserted: Any, *, norms: tuple[float, float]) -> Seen:
    """Where canaries with these gradients are looked for.

    ``norms``: from which length on they are clipped, and what such a one may add.
    """
    clip_norm, most = norms
    found = jnp.linalg.norm(rows, axis=1)
    can_tell = jnp.isfinite(found) & (found > _SHORTEST * clip_norm)
    directions = jnp.where(can_tell[:, None], rows / jnp.where(can_tell, found, 1.0)[:, None], 0.0)
    lengths = jnp.where(can_tell, jnp.minimum(found / clip_norm, 1.0) * most, 1.0)
    own = joins * jnp.sum(directions * alone, axis=1)
    return Seen(directions, lengths, directions @ inserted - own, inserted, losses=None)

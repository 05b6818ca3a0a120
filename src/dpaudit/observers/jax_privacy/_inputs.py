"""Examples as canaries between the loss and the noise of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dpaudit.observers.jax_privacy._clip import Clip
from dpaudit.observers.jax_privacy._crafting import Crafting
from dpaudit.observers.jax_privacy._input_host import InputHost, Seen
from dpaudit.observers.jax_privacy._observer import Join, Observer, tolerance_of
from dpaudit.observers.jax_privacy._vectors import flat, unflat

__all__ = ["InputObserver"]

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

"""Examples as canaries between the loss and the noise of a step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dpaudit.canaries import Crafted
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._clip import Clip
from dpaudit.observers.jax_privacy._examples import crafted
from dpaudit.observers.jax_privacy._input_host import InputHost, Seen
from dpaudit.observers.jax_privacy._observer import Join, Observer, tolerance_of
from dpaudit.observers.jax_privacy._vectors import flat, unflat

__all__ = ["InputObserver"]

_SHORTEST = 1e-12  # in clipping norms: along a gradient that is shorter nothing can be said


class InputObserver(Observer):
    """Lets examples join: the gradient function itself finds, clips and adds their gradients.

    A canary is looked for along its gradient at the weights of the step. A score is what was released there,
    without the batch and the other canaries, over what the canary may add: 1 where it is, more if it was not
    clipped.
    """

    def __init__(self, host: InputHost, max_grad_norm: float | None = None) -> None:
        super().__init__(host, max_grad_norm)
        self._inputs = host

    def _joining(self, clip: Clip, grad_fn: Any) -> Join:
        if clip.has_chance:
            raise InputError(
                "Expected gradients that do not depend on chance, got prng_argnum=...: a canary has another "
                "gradient each time then. Use a canary that is a gradient, such as Dirac()."
            )
        return partial(self._join, clip, grad_fn)

    def _join(self, clip: Clip, grad_fn: Any, args: Any, kwargs: dict[str, Any], total: Any) -> Any:
        if set(kwargs) - {"is_padding_example"}:
            raise InputError(
                f"Expected no keywords but is_padding_example, which canaries do not have, got {set(kwargs)}."
            )
        inputs, targets, rows = self._gradients(clip, args)
        joins = self._inputs.joins(len(targets))
        summed = partial(_summed, clip=clip, grad_fn=grad_fn, args=args)
        together = summed(inputs, targets, joins > 0)
        alone = jax.lax.map(
            lambda one: flat(summed(one[0][None], one[1][None], jnp.ones(1, jnp.bool_))), (inputs, targets)
        )
        joined = jax.tree.map(jnp.add, total, together)
        seen = _seen(rows, alone, joins, flat(together), norms=(clip.norm(self.norm), self.norm))
        off = jnp.max(jnp.abs(seen.inserted - joins @ alone))
        stray = off > tolerance_of(total) * jnp.max(jnp.abs(alone))
        batch, both = (seen.directions @ flat(tree) for tree in (total, joined))
        self._inputs.note_inputs(inputs, batch, both, stray, seen)
        return joined

    def _gradients(self, clip: Clip, args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The canaries of this step, and their gradients before clipping."""
        host = self._inputs
        due, inputs, targets = host.examples()

        def gradient(one: Any, target: Any) -> jax.Array:
            return flat(clip.gradient(args, one, target))

        if isinstance(host.canary, Crafted):
            assert host.data is not None  # as required
            norm = clip.norm(self.norm)
            craft = partial(
                crafted, canary=host.canary, data=host.data, gradient=gradient, max_grad_norm=norm
            )
            inputs = jax.lax.cond(due, craft, lambda start, _: start, inputs, targets)
        return inputs, targets, jax.vmap(gradient)(inputs, targets)

    def _without(self, arrived: Any, released: Any) -> Any:
        size = sum(leaf.size for leaf in jax.tree.leaves(arrived))
        directions, inserted = self._inputs.looked_at(size)
        seen, given = (directions @ flat(tree) for tree in (released, arrived))
        scale = self._inputs.release(seen, given, tolerance_of(arrived))[0]
        return jax.tree.map(jnp.subtract, arrived, unflat(scale * inserted, arrived))


def _summed(inputs: Any, targets: Any, is_real: Any, *, clip: Clip, grad_fn: Any, args: Any) -> Any:
    """The clipped sum of those examples that are real, by the library; some more fill up a microbatch."""
    missing = math.ceil(len(targets) / clip.multiple) * clip.multiple - len(targets)
    inputs, targets = (
        jnp.concatenate([part, jnp.repeat(part[:1], missing, axis=0)]) for part in (inputs, targets)
    )
    is_padding = jnp.concatenate([~is_real, jnp.ones(missing, jnp.bool_)])
    result = grad_fn(*clip.with_batch(args, inputs, targets), is_padding_example=is_padding)
    return result[0] if clip.has_aux else result


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
    return Seen(directions, lengths, directions @ inserted - own, inserted)

"""Crafting of canaries at the weights of a step, inside of compiled code.

:class:`JaxCrafting` knows the objective of each kind of canary; :class:`JaxSearch` moves inputs through their
domain to where it is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpaudit.canaries import Adversarial, Crafted, InputCanary
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import HeldOutArrays, JaxDomain

Objective: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""From inputs and classes to a number for each, the smaller the better, and how it changes with the input."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JaxSearch:
    """``num_steps`` of ``step_size`` spans each, no further than ``radius`` spans from the start.

    It goes the way of the search for models of torch, and like it returns the best input that it met.
    """

    domain: JaxDomain
    num_steps: int
    step_size: float
    radius: float | None = None

    def __call__(self, objective: Objective, inputs: Any, targets: Any) -> Any:
        """Return the best inputs near these."""
        moved = self._flip if self.domain.is_binary else self._walk
        return moved(objective, inputs, targets)

    def _walk(self, objective: Objective, start: Any, targets: Any) -> Any:
        """Steps along the sign of the slope, shorter and shorter, as projected gradient descent does."""

        def step(number: Any, now: tuple[Any, ...]) -> tuple[Any, ...]:
            inputs, slopes, best, least = now
            length = self.step_size * (1 - number / self.num_steps)
            inputs = self._near(start, inputs - length * self.domain.span * jnp.sign(slopes))
            values, slopes = objective(inputs, targets)
            ok = values < least  # never, if it is not a number
            return inputs, slopes, jnp.where(_like(ok, inputs), inputs, best), jnp.where(ok, values, least)

        least, slopes = objective(start, targets)
        return jax.lax.fori_loop(0, self.num_steps, step, (start, slopes, start, least))[2]

    def _near(self, start: Any, inputs: Any) -> Any:
        if self.radius is not None:
            reach = self.radius * self.domain.span
            inputs = jnp.clip(inputs, start - reach, start + reach)
        return self.domain.nearest(inputs.astype(start.dtype))

    def _flip(self, objective: Objective, start: Any, targets: Any) -> Any:
        """Flip those features that promise most; where that fails, fewer of them, then others."""
        first = start.reshape(len(start), -1)

        def step(_: Any, now: tuple[Any, ...]) -> tuple[Any, ...]:
            best, least, slopes, counts, failed = now
            tried = self._flips(best, first, slopes, counts, failed)
            inputs = jnp.where(tried, self.domain.flipped(best), best)
            values, new = objective(inputs.reshape(start.shape), targets)
            ok = values < least
            alone = ~ok & (counts == 1)
            return (
                jnp.where(ok[:, None], inputs, best),
                jnp.where(ok, values, least),
                jnp.where(ok[:, None], new.reshape(first.shape), slopes),
                jnp.where(ok, counts, jnp.maximum(counts // 2, 1)),
                (failed | (tried & alone[:, None])) & ~ok[:, None],
            )

        least, slopes = objective(start, targets)
        counts = jnp.full(len(start), self._at_once(first.shape[1]))
        failed = jnp.zeros(first.shape, bool)
        begin = first, least, slopes.reshape(first.shape), counts, failed
        return jax.lax.fori_loop(0, self.num_steps, step, begin)[0].reshape(start.shape)

    def _at_once(self, size: int) -> int:
        share = self.step_size if self.radius is None else min(self.step_size, self.radius)
        return max(1, round(share * size))

    def _flips(self, now: Any, start: Any, slopes: Any, counts: Any, failed: Any) -> Any:
        """Choose the features to flip: of each input the ``counts`` most promising that are allowed."""
        promise = -slopes * (self.domain.flipped(now) - now)
        allowed = ~failed
        if self.radius is not None:  # one that was flipped may always be flipped back
            room = max(1, round(self.radius * now.shape[1])) - (now != start).sum(axis=1)
            allowed &= (now != start) | (room >= counts)[:, None]
        order = jnp.argsort(jnp.where(allowed, promise, -jnp.inf), axis=1, descending=True)
        return (jnp.argsort(order, axis=1) < counts[:, None]) & allowed


def _like(mask: Any, other: Any) -> Any:
    return mask.reshape(-1, *[1] * (other.ndim - 1))


OfOne: TypeAlias = Callable[[Any, Any], jax.Array]
"""From one input and its class to the loss, or to its gradient as a vector."""

_AT_ONCE = 32  # held-out examples whose gradients are found together
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True, eq=False)
class JaxCrafting:
    """What canaries are moved with: loss and gradient at the present weights, and held-out data."""

    data: HeldOutArrays
    loss: OfOne
    gradient: OfOne
    max_grad_norm: float

    def __call__(self, canary: InputCanary, start: Any, targets: Any) -> Any:
        """Return the inputs that ``canary`` describes, from these."""
        match canary:
            case Adversarial():
                return self._moved(self._negative_loss, canary, start, targets, radius=canary.radius)
            case Crafted():
                return self._moved(self._cosine(canary), canary, start, targets)
        raise InputError(f"Expected canary to be Adversarial() or Crafted(), got {canary!r}.")

    def _moved(
        self,
        value: OfOne,
        canary: Adversarial | Crafted,
        start: Any,
        targets: Any,
        *,
        radius: float | None = None,
    ) -> Any:
        search = JaxSearch(
            domain=JaxDomain.of(self.data.inputs),
            num_steps=canary.num_steps,
            step_size=canary.step_size,
            radius=radius,
        )
        return search(jax.vmap(jax.value_and_grad(value)), start, targets)

    def _negative_loss(self, one: Any, target: Any) -> jax.Array:
        return -self.loss(one, target)

    def _cosine(self, canary: Crafted) -> OfOne:
        """Return the absolute cosine to the mean gradient of held-out data, and what else the canary says."""
        reference = mean_gradient(self.data, self.gradient)

        def value(one: Any, target: Any) -> jax.Array:
            found = self.gradient(one, target)
            norm, other = _norm(found), _norm(reference)
            cosine = jnp.abs(found @ reference / (norm * other))
            return jnp.asarray(canary.objective(cosine, norm, self.max_grad_norm))

        return value


def mean_gradient(data: HeldOutArrays, gradient: OfOne) -> jax.Array:
    """Return it of all held-out examples, in chunks of one size; what fills up the last has no weight."""
    size = min(_AT_ONCE, len(data))
    places = np.arange(math.ceil(len(data) / size) * size)
    weights = (places < len(data)).astype(np.float32)
    parts = data.inputs[places % len(data)], data.targets[places % len(data)], weights
    chunks = jax.tree.map(lambda part: jnp.asarray(part).reshape(-1, size, *part.shape[1:]), parts)
    sums = jax.lax.map(lambda chunk: chunk[2] @ jax.vmap(gradient)(*chunk[:2]), chunks)
    mean: jax.Array = sums.sum(axis=0) / len(data)
    return mean


def _norm(vector: jax.Array) -> jax.Array:
    """Return a norm that is never zero, where a square root has no derivative."""
    return jnp.sqrt(vector @ vector + _TINY)

"""Inputs that are moved to where a canary is seen best, at the weights of a step; inside of compiled code."""

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
from dpaudit.observers.jax_privacy._domain import Domain
from dpaudit.observers.jax_privacy._held_out import HeldOutArrays
from dpaudit.observers.jax_privacy._search import Search

__all__ = ["Crafting", "OfOne", "mean_gradient"]

OfOne: TypeAlias = Callable[[Any, Any], jax.Array]
"""From one input and its class to the loss, or to its gradient as a vector."""

_AT_ONCE = 32  # held-out examples whose gradients are found together
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True, eq=False)
class Crafting:
    """What canaries are moved with: loss and gradient at the present weights, and held-out data."""

    data: HeldOutArrays
    loss: OfOne
    gradient: OfOne
    max_grad_norm: float

    def __call__(self, canary: InputCanary, start: Any, targets: Any) -> Any:
        """The inputs that ``canary`` describes, from these."""
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
        search = Search(
            domain=Domain.of(self.data.inputs),
            num_steps=canary.num_steps,
            step_size=canary.step_size,
            radius=radius,
        )
        return search(jax.vmap(jax.value_and_grad(value)), start, targets)

    def _negative_loss(self, one: Any, target: Any) -> jax.Array:
        return -self.loss(one, target)

    def _cosine(self, canary: Crafted) -> OfOne:
        """The absolute cosine to the mean gradient of held-out data, and what else the canary says."""
        reference = mean_gradient(self.data, self.gradient)

        def value(one: Any, target: Any) -> jax.Array:
            found = self.gradient(one, target)
            norm, other = _norm(found), _norm(reference)
            cosine = jnp.abs(found @ reference / (norm * other))
            return jnp.asarray(canary.objective(cosine, norm, self.max_grad_norm))

        return value


def mean_gradient(data: HeldOutArrays, gradient: OfOne) -> jax.Array:
    """Of all held-out examples, found in chunks of one size; what fills the last one up has no weight."""
    size = min(_AT_ONCE, len(data))
    places = np.arange(math.ceil(len(data) / size) * size)
    weights = (places < len(data)).astype(np.float32)
    parts = data.inputs[places % len(data)], data.targets[places % len(data)], weights
    chunks = jax.tree.map(lambda part: jnp.asarray(part).reshape(-1, size, *part.shape[1:]), parts)
    sums = jax.lax.map(lambda chunk: chunk[2] @ jax.vmap(gradient)(*chunk[:2]), chunks)
    mean: jax.Array = sums.sum(axis=0) / len(data)
    return mean


def _norm(vector: jax.Array) -> jax.Array:
    """Never zero, where a square root has no derivative."""
    return jnp.sqrt(vector @ vector + _TINY)

"""Crafting of canaries at the weights of a step, inside compiled code.

:class:`JaxCrafting` defines the objective of each kind of canary; :class:`JaxCraftingSearch` moves inputs
through their domain to minimize it.
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
from dpaudit.observers.jax_privacy._canaries import HeldOutArrays, JaxInputDomain

Objective: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""Maps inputs and classes to one value each, the smaller the better, and its gradient in the input."""
ExampleFunction: TypeAlias = Callable[[Any, Any], jax.Array]
"""Maps one input and its class to the loss, or to its gradient as a vector."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JaxCrafting:
    """A function that crafts canaries from held-out data, with loss and gradient at the current weights."""

    data: HeldOutArrays
    loss: ExampleFunction
    gradient: ExampleFunction
    max_grad_norm: float

    def __call__(self, canary: InputCanary, start: Any, targets: Any) -> Any:
        """Return the inputs that ``canary`` describes, crafted from ``start``."""
        match canary:
            case Adversarial():
                return self._search(self._negative_loss, canary, start, targets, radius=canary.radius)
            case Crafted():
                return self._search(self._cosine(canary), canary, start, targets)
        raise InputError(f"Expected canary to be Adversarial() or Crafted(), got {canary!r}.")

    def _search(
        self,
        value: ExampleFunction,
        canary: Adversarial | Crafted,
        start: Any,
        targets: Any,
        *,
        radius: float | None = None,
    ) -> Any:
        search = JaxCraftingSearch(
            domain=JaxInputDomain.of(self.data.inputs),
            num_steps=canary.num_steps,
            step_size=canary.step_size,
            radius=radius,
        )
        return search(jax.vmap(jax.value_and_grad(value)), start, targets)

    def _negative_loss(self, example: Any, target: Any) -> jax.Array:
        return -self.loss(example, target)

    def _cosine(self, canary: Crafted) -> ExampleFunction:
        """Return the absolute cosine to the mean gradient of held-out data; ``canary`` may add a term."""
        reference = mean_gradient(self.data, self.gradient)

        def value(example: Any, target: Any) -> jax.Array:
            gradient = self.gradient(example, target)
            norm, other = _norm(gradient), _norm(reference)
            cosine = jnp.abs(gradient @ reference / (norm * other))
            return jnp.asarray(canary.objective(cosine, norm, self.max_grad_norm))

        return value


def mean_gradient(data: HeldOutArrays, gradient: ExampleFunction) -> jax.Array:
    """Return the mean gradient of held-out examples, in chunks of equal size; padding has weight 0."""
    size = min(32, len(data))
    indices = np.arange(math.ceil(len(data) / size) * size)
    weights = (indices < len(data)).astype(np.float32)
    arrays = data.inputs[indices % len(data)], data.targets[indices % len(data)], weights
    chunks = jax.tree.map(lambda array: jnp.asarray(array).reshape(-1, size, *array.shape[1:]), arrays)
    sums = jax.lax.map(lambda chunk: chunk[2] @ jax.vmap(gradient)(*chunk[:2]), chunks)
    mean: jax.Array = sums.sum(axis=0) / len(data)
    return mean


def _norm(vector: jax.Array) -> jax.Array:
    """Return the norm, kept above zero, where the square root has no derivative."""
    return jnp.sqrt(vector @ vector + 1e-30)


@dataclass(frozen=True, kw_only=True, eq=False)
class JaxCraftingSearch:
    """A search with ``num_steps`` steps of ``step_size`` spans, at most ``radius`` spans from the start.

    It takes the same steps as the search for torch models, and also returns the best input that it tried.
    """

    domain: JaxInputDomain
    num_steps: int
    step_size: float
    radius: float | None = None

    def __call__(self, objective: Objective, inputs: Any, targets: Any) -> Any:
        """Return the best inputs found, starting from these."""
        search = self._flip_features if self.domain.is_binary else self._descend
        return search(objective, inputs, targets)

    def _descend(self, objective: Objective, start: Any, targets: Any) -> Any:
        """Take shrinking steps along the sign of the gradient: projected gradient descent."""

        def step(number: Any, now: tuple[Any, ...]) -> tuple[Any, ...]:
            inputs, gradients, best, least = now
            length = self.step_size * (1 - number / self.num_steps)
            inputs = self._project(start, inputs - length * self.domain.span * jnp.sign(gradients))
            values, gradients = objective(inputs, targets)
            ok = values < least  # false for NaN
            return (
                inputs,
                gradients,
                jnp.where(_expanded(ok, inputs), inputs, best),
                jnp.where(ok, values, least),
            )

        least, gradients = objective(start, targets)
        return jax.lax.fori_loop(0, self.num_steps, step, (start, gradients, start, least))[2]

    def _project(self, start: Any, inputs: Any) -> Any:
        if self.radius is not None:
            distance = self.radius * self.domain.span
            inputs = jnp.clip(inputs, start - distance, start + distance)
        return self.domain.nearest(inputs.astype(start.dtype))

    def _flip_features(self, objective: Objective, start: Any, targets: Any) -> Any:
        """Flip the most promising features; if that fails, fewer of them, then others."""
        first = start.reshape(len(start), -1)

        def step(_: Any, now: tuple[Any, ...]) -> tuple[Any, ...]:
            best, least, gradients, counts, failed = now
            tried = self._choose_flips(best, first, gradients, counts, failed)
            inputs = jnp.where(tried, self.domain.flipped(best), best)
            values, new = objective(inputs.reshape(start.shape), targets)
            ok = values < least
            alone = ~ok & (counts == 1)
            return (
                jnp.where(ok[:, None], inputs, best),
                jnp.where(ok, values, least),
                jnp.where(ok[:, None], new.reshape(first.shape), gradients),
                jnp.where(ok, counts, jnp.maximum(counts // 2, 1)),
                (failed | (tried & alone[:, None])) & ~ok[:, None],
            )

        least, gradients = objective(start, targets)
        counts = jnp.full(len(start), self._num_flipped(first.shape[1]))
        failed = jnp.zeros(first.shape, bool)
        begin = first, least, gradients.reshape(first.shape), counts, failed
        return jax.lax.fori_loop(0, self.num_steps, step, begin)[0].reshape(start.shape)

    def _num_flipped(self, size: int) -> int:
        share = self.step_size if self.radius is None else min(self.step_size, self.radius)
        return max(1, round(share * size))

    def _choose_flips(self, now: Any, start: Any, gradients: Any, counts: Any, failed: Any) -> Any:
        """Choose the features to flip: the ``counts`` most promising allowed ones of each input."""
        promise = -gradients * (self.domain.flipped(now) - now)
        allowed = ~failed
        if self.radius is not None:  # a flipped feature may always be flipped back
            room = max(1, round(self.radius * now.shape[1])) - (now != start).sum(axis=1)
            allowed &= (now != start) | (room >= counts)[:, None]
        order = jnp.argsort(jnp.where(allowed, promise, -jnp.inf), axis=1, descending=True)
        return (jnp.argsort(order, axis=1) < counts[:, None]) & allowed


def _expanded(mask: Any, other: Any) -> Any:
    return mask.reshape(-1, *[1] * (other.ndim - 1))

"""Input canaries as arrays: what they start from, and how compiled code moves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpaudit.canaries import Blank, Crafted, InputCanary, Mislabelled
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._held_out import Given, HeldOutArrays

__all__ = ["Gradient", "crafted", "first_examples", "mean_gradient", "require_examples"]

Gradient: TypeAlias = Callable[[Any, Any], jax.Array]
"""From one input and its class to the gradient, as a vector."""

_AT_ONCE = 32  # held-out examples whose gradients are found together
_TINY = 1e-30


def require_examples(canary: InputCanary, data: object) -> None:
    """Whether canaries of this kind can be made from these data."""
    if isinstance(canary, Given):
        if data is not None:
            raise InputError("Expected no held_out with Given(...), which has examples of its own.")
        return
    if not isinstance(canary, Blank | Mislabelled | Crafted):
        raise InputError(
            f"Expected canary to be Blank(), Mislabelled(), Crafted() or Given(...) with JAX, got {canary!r}."
        )
    if not isinstance(data, HeldOutArrays):
        raise InputError(
            f"Expected held_out, the examples that hold_out() splits off, for {canary!r} to be made from, "
            f"got {data if data is None else type(data).__name__}."
        )
    if isinstance(canary, Crafted) and _is_binary(data.inputs):
        raise InputError(
            f"Expected inputs that can be moved a little for {canary!r}, got binary ones: use Mislabelled()."
        )


def first_examples(
    canary: InputCanary, data: HeldOutArrays | None, num_canaries: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """So many inputs and their classes, each from an example of its own while there are enough."""
    if isinstance(canary, Given):
        return np.asarray(canary.inputs), np.asarray(canary.targets)
    assert data is not None  # as required
    places = rng.choice(len(data), num_canaries, replace=num_canaries > len(data))
    inputs, targets = data.inputs[places], data.targets[places]
    if isinstance(canary, Blank):
        zeros = _nearest(np.zeros_like(inputs), data.inputs)
        return zeros, rng.integers(0, data.num_classes, num_canaries).astype(targets.dtype)
    if isinstance(canary, Mislabelled):
        others = rng.integers(1, data.num_classes, num_canaries)
        return inputs, ((targets + others) % data.num_classes).astype(targets.dtype)
    return inputs, targets


def _nearest(inputs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The nearest inputs in the domain of those that are known; halfway is low, as with torch."""
    if _is_binary(known):
        low, high = known.min(), known.max()
        found = np.where(inputs > (low + high) / 2, high, low)
    else:
        found = np.clip(inputs, *_range(known))
    return np.asarray(found, dtype=inputs.dtype)


def _is_binary(inputs: np.ndarray) -> bool:
    low, high = inputs.min(), inputs.max()
    return bool(low < high) and bool(((inputs == low) | (inputs == high)).all())


def _range(inputs: np.ndarray) -> tuple[Any, Any]:
    """Features of a table have a range each; pixels share one."""
    axis = 0 if inputs.ndim == 2 else None
    return inputs.min(axis=axis), inputs.max(axis=axis)


def crafted(
    start: Any,
    targets: Any,
    *,
    canary: Crafted,
    data: HeldOutArrays,
    gradient: Gradient,
    max_grad_norm: float,
) -> jax.Array:
    """Inputs whose gradients are orthogonal to the mean gradient of held-out data; inside of compiled code.

    Steps along the sign of the slope become shorter and shorter. The best input that was met is returned.
    """
    reference = mean_gradient(data, gradient)
    low, high = _range(data.inputs)

    def value(one: jax.Array, target: jax.Array) -> jax.Array:
        found = gradient(one, target)
        norm, other = _norm(found), _norm(reference)
        cosine = jnp.abs(found @ reference / (norm * other))
        return jnp.asarray(canary.objective(cosine, norm, max_grad_norm))

    look = jax.vmap(jax.value_and_grad(value))

    def step(number: Any, now: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs, slopes, best, least = now
        length = canary.step_size * (1 - number / canary.num_steps)
        inputs = jnp.clip(inputs - length * (high - low) * jnp.sign(slopes), low, high).astype(start.dtype)
        values, slopes = look(inputs, targets)
        better = values < least
        best = jnp.where(better.reshape(-1, *[1] * (inputs.ndim - 1)), inputs, best)
        return inputs, slopes, best, jnp.where(better, values, least)

    least, slopes = look(start, targets)
    result: jax.Array = jax.lax.fori_loop(0, canary.num_steps, step, (start, slopes, start, least))[2]
    return result


def mean_gradient(data: HeldOutArrays, gradient: Gradient) -> jax.Array:
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

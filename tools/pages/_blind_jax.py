"""Small private training runs with JAX Privacy, for the blind benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _blind_case import dpsgd_claim
from jax_privacy import clipped_grad, noise_addition

import dpaudit
from dpaudit.jax_privacy import observe
from dpaudit.observers import jax_privacy
from dpaudit.training.data import digits

__all__ = [
    "CAPACITY",
    "JAX_BATCH",
    "JAX_EXAMPLES",
    "JaxLoop",
    "jax_digits",
    "jax_loss",
    "jax_parameters",
    "jax_training",
    "padded",
    "poisson_batches",
    "usual_step",
]

JAX_EXAMPLES = 600
JAX_BATCH = 30
CAPACITY = 80  # rows of a batch with its padding; a Poisson draw of 30 on average never exceeds it
NUM_STEPS = 40

Step = Callable[[Any, Any, Any, Any], Any]


@dataclass
class JaxLoop:
    """A training run with JAX Privacy: ``step(grad_fn, privatizer, state, batch)`` for each batch."""

    grad_fn: Any
    privatizer: Any
    step: Step
    state: Any
    data: tuple[np.ndarray, ...]
    batches: Callable[[], Iterable[np.ndarray]]  # rows of each batch, -1 for padding
    claim: Any = field(default_factory=dpsgd_claim)
    padding: int | None = -1  # the part of a batch that marks padding
    observed: dict[str, Any] = field(default_factory=dict)
    can_replay: bool = True

    def batch(self, rows: np.ndarray) -> tuple[Any, ...]:
        """Return the arrays of a batch."""
        parts = tuple(array[rows] for array in self.data)
        return parts if self.padding is None else (*parts, rows < 0)

    def audit(self, seed: int) -> Sequence[Any]:
        """Train under observation and audit."""
        return (self.observe(seed).audit(),)

    def observe(self, seed: int) -> Any:
        """Train under observation."""
        seen = observe(self.grad_fn, self.privatizer, claim=self.claim, seed=seed, **self.observed)
        step = jax.jit(lambda state, batch: self.step(seen.grad_fn, seen.privatizer, state, batch))
        state = self.state
        for rows in self.batches():
            state = step(state, self.batch(rows))
        return seen.recorder

    def replay(self, seed: int) -> Any:
        """Train under observation and replay one step; without observation, if that is refused."""
        batch = self.batch(np.arange(8))
        padding = None if self.padding is None else len(batch) - 1
        try:
            recorder = self.observe(seed)
        except (dpaudit.DpauditError, jax.errors.JaxRuntimeError):
            parts = {"grad_fn": self.grad_fn, "privatizer": self.privatizer}
            return jax_privacy.replay(self.step, self.state, batch, padding=padding, **parts)
        return recorder.replay(self.step, self.state, batch, padding=padding)


def jax_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of handwritten digits."""
    train, _ = digits().split(JAX_EXAMPLES)
    inputs = train.inputs.reshape(len(train), -1).numpy().astype(np.float32)
    return inputs, train.targets.numpy().astype(np.int32)


def jax_parameters(seed: int) -> dict[str, Any]:
    """Return the weights of a network for the digits."""
    rng = np.random.default_rng(seed)
    return {
        "first": jnp.asarray(rng.normal(size=(64, 16)) / 8, dtype=jnp.float32),
        "second": jnp.asarray(rng.normal(size=(16, 10)) / 4, dtype=jnp.float32),
    }


def jax_loss(params: Any, inputs: Any, targets: Any) -> Any:
    """Return the mean cross-entropy."""
    logits = jnp.tanh(inputs @ params["first"]) @ params["second"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def padded(chosen: np.ndarray) -> np.ndarray:
    """Return the rows of a batch, filled to one shape."""
    return np.pad(chosen, (0, CAPACITY - len(chosen)), constant_values=-1)


def poisson_batches(seed: int, num_steps: int = NUM_STEPS) -> Iterable[np.ndarray]:
    """Draw each example with probability 1/20 in each step."""
    rng = np.random.default_rng(1000 + seed)
    for _ in range(num_steps):
        yield padded(np.flatnonzero(rng.random(JAX_EXAMPLES) < JAX_BATCH / JAX_EXAMPLES))


def usual_step(grad_fn: Any, privatizer: Any, state: Any, batch: Any) -> Any:
    """Train on one batch."""
    params, noise_state = state
    inputs, targets, is_padding = batch
    gradient = grad_fn(params, inputs, targets, is_padding_example=is_padding)
    noisy, noise_state = privatizer.update(gradient, noise_state)
    return optax.apply_updates(params, optax.tree.scale(-0.5, noisy)), noise_state


def jax_training(seed: int, *, loss: Callable[..., Any] = jax_loss, params: Any = None) -> JaxLoop:
    """Return an ordinary private training."""
    grad_fn = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=JAX_BATCH, batch_argnums=(1, 2))
    privatizer = noise_addition.gaussian_privatizer(stddev=grad_fn.sensitivity(), prng_key=seed)
    params = jax_parameters(seed) if params is None else params
    return JaxLoop(
        grad_fn=grad_fn,
        privatizer=privatizer,
        step=usual_step,
        state=(params, privatizer.init(params)),
        data=jax_digits(),
        batches=lambda: poisson_batches(seed),
    )

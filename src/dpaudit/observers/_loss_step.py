"""Canaries in the steps of a function that finds gradients itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpaudit.accounting import Claim
from dpaudit.canaries import Dirac, Draws, GradientCanary, fresh_seed
from dpaudit.errors import InputError
from dpaudit.observers._arrays import is_jax, is_torch, like
from dpaudit.observers._step import run_steps
from dpaudit.observers._step_recorder import StepRecorder
from dpaudit.observers._trees import flat, leaves, mapped, product
from dpaudit.recording import LiveBound
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["observe_loss_step"]

_DIRAC = Dirac()


def observe_loss_step(
    step: Callable[[Callable[[Any, Any], Any], Any, Any], Any],
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    claim: Claim,
    max_grad_norm: float,
    batch_size: float | None = None,
    num_steps: int = 300,
    canary: GradientCanary = _DIRAC,
    num_canaries: int = 64,
    confidence: float = 0.95,
    seed: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> StepRecorder:
    """Run ``step(loss, params, batch)`` so many times on canaries, each present by a fair coin.

    ``step`` finds the gradient of ``loss(params, example)`` for every example of a batch, by jax or by
    ``torch.func``, and returns the noisy sum of the clipped ones, like ``params`` (or their mean, if that is
    what ``batch_size`` says it is divided by). It gets another loss, and a batch of as many examples as there
    are canaries, taken in turn from ``batch``. Each has a canary beside it, whose dot product with the
    parameters takes the place of the loss: its gradient is the canary, or zero if that is absent. So the step
    has to hand the batch on to the loss as it is. ``params`` are the same in all steps.
    """
    shapes = [tuple(leaf.shape) for leaf in leaves(params)]
    if not shapes:
        raise InputError("Expected parameters of jax or torch, got none.")
    first = leaves(params)[0]
    if not (is_jax(first) or is_torch(first)):
        raise InputError(
            f"Expected parameters of jax or torch, which find gradients, got a {type(first).__name__}."
        )
    size = flat(params).size
    examples, observed = _repeated(batch, num_canaries), _with_canaries(loss)

    def release(rows: FloatArray, present: BoolArray) -> FloatArray:
        canaries = like(first, rows * present[:, None])
        return _released(step(observed, params, (examples, canaries)), shapes)

    return run_steps(
        release,
        np.empty((0, size)),
        leaves=[int(np.prod(shape)) for shape in shapes],
        claim=claim,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
        num_steps=num_steps,
        draws=Draws(canary, num_canaries, fresh_seed(seed)),
        confidence=confidence,
        callbacks=callbacks,
    )


def _with_canaries(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The loss of an example with a canary beside it."""

    def observed(params: Any, example: Any) -> Any:
        own, canary = example
        vector = canary.reshape(-1)  # a step may give it a dimension of 1 more
        return 0.0 * loss(params, own) + product(vector, params)

    return observed


def _repeated(batch: Any, count: int) -> Any:
    """So many examples of the batch, the first ones again after the last one."""
    sizes = {leaf.shape[0] if leaf.shape else 0 for leaf in leaves(batch)}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(f"Expected arrays of one number of examples, and not of none, got {sorted(sizes)}.")
    places = np.arange(count) % sizes.pop()
    return mapped(lambda leaf: leaf[places], batch)


def _released(gradient: Any, shapes: list[tuple[int, ...]]) -> FloatArray:
    """The numbers of a gradient; its order is only known if it is made like the parameters."""
    found = [tuple(leaf.shape) for leaf in leaves(gradient)]
    if found != shapes:
        raise InputError(
            f"Expected the step to return a gradient of shapes {shapes}, like the parameters, got {found}."
        )
    return flat(gradient)

"""Canaries in the steps of any function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpaudit import _validate
from dpaudit.accounting import Claim
from dpaudit.canaries import Dirac, Draws, GradientCanary, fresh_seed
from dpaudit.diagnostics.noise import Leaves
from dpaudit.errors import InputError
from dpaudit.observers._arrays import as_numpy, require_rows, require_vector, with_rows
from dpaudit.observers._facts import Facts
from dpaudit.observers._known_sum import require_known_sum
from dpaudit.observers._residuals import Residuals, clipped_sum
from dpaudit.observers._rounding import sum_rounding
from dpaudit.observers._step_recorder import StepRecorder
from dpaudit.recording import LiveBound
from dpaudit.stats import Gaussian
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["observe_step", "run_steps"]

_DIRAC = Dirac()
_OWN_NOISE = 3  # a purpose of chance, besides those of Draws and of the native audits


def observe_step(
    step: Callable[[Any], Any],
    gradients: Any,
    *,
    claim: Claim,
    max_grad_norm: float,
    batch_size: float | None = None,
    num_steps: int = 300,
    canary: GradientCanary = _DIRAC,
    num_canaries: int = 64,
    leaves: Leaves | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> StepRecorder:
    """Run ``step`` so many times on ``gradients`` with canaries among them, each present by a fair coin.

    ``step`` takes per-example gradients (examples x parameters, in numpy, torch or jax) and returns a
    gradient: the noisy sum of the clipped ones, or their mean, if that is what ``batch_size`` says it is
    divided by. ``gradients`` are those of the other examples; zeros, or none at all, tell most, because the
    sum of others is only known if they are clipped. The number of rows changes with the coins. The claim
    is of a single step, or of a training of such steps. ``leaves`` are the sizes of the parameters that a
    gradient is made of, by name if there are names: for ``diagnose()`` of what this returns.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> def quiet(rows):  # noise 1 claimed, 0.5 added
    ...     norms = np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
    ...     return (rows / norms).sum(axis=0) + 0.5 * rng.standard_normal(rows.shape[1])
    >>> claim = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    >>> recorder = observe_step(quiet, np.zeros((4, 100)), claim=claim, max_grad_norm=1.0, seed=0)
    >>> recorder.audit().verdict.name
    'VIOLATION'
    """
    _, num_parameters = require_rows(gradients)
    return run_steps(
        lambda rows, present: require_vector(step(with_rows(gradients, rows[present])), num_parameters),
        gradients,
        claim=claim,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
        num_steps=num_steps,
        draws=Draws(canary, num_canaries, fresh_seed(seed)),
        leaves=leaves,
        confidence=confidence,
        callbacks=callbacks,
    )


def run_steps(
    release: Callable[[FloatArray, BoolArray], FloatArray],
    gradients: Any,
    *,
    claim: Claim,
    max_grad_norm: float,
    batch_size: float | None,
    num_steps: int,
    draws: Draws,
    leaves: Leaves | None,
    confidence: float,
    callbacks: Sequence[Callable[[LiveBound], None]],
) -> StepRecorder:
    """Record so many releases; ``release`` gets the canaries, a row each, and which of them are present."""
    norm = _validate.positive("max_grad_norm", max_grad_norm)
    divisor = 1.0 if batch_size is None else _validate.positive("batch_size", batch_size)
    std = _claimed_noise(claim, norm)
    residuals = None
    if std is not None:
        rounding, own = sum_rounding(gradients, norm), draws.chance(0, _OWN_NOISE)
        residuals = Residuals(max_grad_norm=norm, std=std, leaves=leaves, rounding=rounding, rng=own)
    recorder = StepRecorder(
        residuals,
        facts=lambda: Facts(canary=draws.canary, max_grad_norm=norm, batch_size=batch_size),
        claim=claim,
        num_steps=num_steps,
        confidence=confidence,
        callbacks=callbacks,
        signal=min(draws.canary.scale, 1.0),
    )
    others = clipped_sum(as_numpy(gradients), norm)
    for index in range(num_steps):
        if index == 0 or draws.canary.moving:
            directions = draws.directions(index, others.size)
            rows = draws.canary.scale * norm * directions.dense()
        present = draws.coins(index)
        released = divisor * release(rows, present) - others
        recorder.record(directions.project(released) / norm, present)
        if residuals is not None:
            residuals.observe(released, rows[present])
    if others.any() and not draws.canary.moving:
        seen = recorder.state_dict()
        require_known_sum(seen["scores"], seen["present"])
    return recorder


def _claimed_noise(claim: object, norm: float) -> float | None:
    """The standard deviation that is claimed for the noise of a sum, if the claim is of Gaussian noise."""
    if not isinstance(claim, Claim):
        raise InputError(f"Expected claim to be such as Claim.gaussian(...), got {claim!r}.")
    hypothesis = claim.hypothesis(None)
    is_known = isinstance(hypothesis.tradeoff, Gaussian) and hypothesis.parameter > 0
    return norm / hypothesis.parameter if is_known else None

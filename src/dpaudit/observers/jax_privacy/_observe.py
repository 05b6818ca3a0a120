"""The way in for loops with ``clipped_grad`` and a privatizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax
from jax_privacy.clipping import BoundedSensitivityCallable

from dpaudit.canaries import Dirac, Draws, GradientCanary, fresh_seed
from dpaudit.observers._facts import Facts
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._terms import Terms
from dpaudit.observers.jax_privacy._host import Host
from dpaudit.observers.jax_privacy._observer import Observer
from dpaudit.observers.jax_privacy._recorder import WaitingRecorder
from dpaudit.observers.jax_privacy._terms import noise_of, rate_of
from dpaudit.recording import LiveBound

__all__ = ["Observed", "observe"]

_DIRAC = Dirac()


class Observed(NamedTuple):
    """What a loop uses instead of what it had, and the recorder."""

    grad_fn: BoundedSensitivityCallable
    privatizer: optax.GradientTransformation
    recorder: ObserverRecorder


def observe(
    grad_fn: Any,
    privatizer: optax.GradientTransformation,
    *,
    canary: GradientCanary = _DIRAC,
    num_canaries: int = 64,
    noise_multiplier: float | None = None,
    max_grad_norm: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    sampling: Any = None,
    confidence: float = 0.95,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Observed:
    """Audit the steps that are made with the two functions that this returns.

    ``grad_fn`` is what ``jax_privacy.clipped_grad`` returned. Canaries go through its own clipping and
    through the noise of ``privatizer``; they are taken off before the update, so that the weights are those
    without audit, up to rounding. What the loop gives to the privatizer has to be the sum of all gradients
    since its last update, or, if ``max_grad_norm`` says what one example may then add, the same multiple of
    it in every step; else an error ends the training. The step may be compiled, or not. The noise multiplier
    is read from both, and the sample rate from ``sampling`` (a strategy of ``jax_privacy.batch_selection``),
    unless they are given here or to ``audit()``. Without ``max_grad_norm``, one example adds what
    ``grad_fn`` says. Chance comes from ``seed``, or from the operating system. ``callbacks`` get the live
    bound while the training runs (with ``every`` so many steps); they may raise to end it.
    """
    noise = noise_of(privatizer)
    rate = None if sampling is None else rate_of(sampling)

    def read() -> Terms:
        return Terms(noise_multiplier=None if noise is None else noise / observer.norm, sample_rate=rate)

    def facts() -> Facts:
        return Facts(canary=canary, max_grad_norm=observer.norm)

    recorder = WaitingRecorder(
        read,
        Terms(noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta),
        signal=min(canary.scale, 1.0),
        facts=facts,
        confidence=confidence,
        every=every,
        callbacks=callbacks,
    )
    observer = Observer(Host(recorder, Draws(canary, num_canaries, fresh_seed(seed))), max_grad_norm)
    return Observed(observer.gradient(grad_fn), observer.privatizer(privatizer), recorder)

"""The way in for loops with ``clipped_grad`` and a privatizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax
from jax_privacy.clipping import BoundedSensitivityCallable

from dpaudit.canaries import Coins, Dirac, Draws, GradientCanary, InputCanary, fresh_seed
from dpaudit.errors import InputError
from dpaudit.observers._facts import Facts, scale_of
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._terms import Terms
from dpaudit.observers.jax_privacy._examples import require_examples
from dpaudit.observers.jax_privacy._held_out import Given, HeldOutArrays
from dpaudit.observers.jax_privacy._host import Host
from dpaudit.observers.jax_privacy._input_host import InputHost
from dpaudit.observers.jax_privacy._inputs import InputObserver
from dpaudit.observers.jax_privacy._observer import Observer
from dpaudit.observers.jax_privacy._recorder import WaitingRecorder
from dpaudit.observers.jax_privacy._terms import noise_of, rate_of
from dpaudit.recording import LiveBound

__all__ = ["Observed", "observe"]

_DIRAC = Dirac()
_GRADIENTS, _INPUTS = 64, 16  # canaries


class Observed(NamedTuple):
    """What a loop uses instead of what it had, and the recorder."""

    grad_fn: BoundedSensitivityCallable
    privatizer: optax.GradientTransformation
    recorder: ObserverRecorder


def observe(
    grad_fn: Any,
    privatizer: optax.GradientTransformation,
    *,
    canary: GradientCanary | InputCanary = _DIRAC,
    held_out: HeldOutArrays | None = None,
    num_canaries: int | None = None,
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

    By default there are 64 canaries that are gradients. With ``held_out``, the examples that :func:`hold_out`
    split off, ``canary`` may be an example, such as ``Crafted()``: by default 16, which go through the loss
    too. :class:`Given` are examples of your own. A batch has to be inputs and a class for each.
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
        signal=min(scale_of(canary), 1.0),
        facts=facts,
        shares_noise=isinstance(canary, InputCanary),
        confidence=confidence,
        every=every,
        callbacks=callbacks,
    )
    chance = fresh_seed(seed)
    observer: Observer
    if isinstance(canary, InputCanary):
        require_examples(canary, held_out)
        coins = Coins(_num_inputs(canary, num_canaries), chance)
        observer = InputObserver(InputHost(recorder, coins, canary, held_out), max_grad_norm)
    else:
        _refuse_data(canary, held_out)
        draws = Draws(canary, _GRADIENTS if num_canaries is None else num_canaries, chance)
        observer = Observer(Host(recorder, draws), max_grad_norm)
    return Observed(observer.gradient(grad_fn), observer.privatizer(privatizer), recorder)


def _num_inputs(canary: InputCanary, asked: int | None) -> int:
    if not isinstance(canary, Given):
        return _INPUTS if asked is None else asked
    if asked not in (None, len(canary.targets)):
        raise InputError(f"Expected num_canaries={asked} to be {len(canary.targets)}, the examples given.")
    return len(canary.targets)


def _refuse_data(canary: GradientCanary, held_out: object) -> None:
    if held_out is not None:
        raise InputError(f"Expected no held_out with {canary!r}, which is made from no example.")

"""The way in: a context around ``fit`` or a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dpaudit.canaries import Dirac, Draws, GradientCanary, fresh_seed
from dpaudit.observers._facts import Facts
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._terms import Terms
from dpaudit.observers._with_block import with_block
from dpaudit.observers.tensorflow._clips import clip_of
from dpaudit.observers.tensorflow._noise import Noise
from dpaudit.observers.tensorflow._observer import Observer
from dpaudit.observers.tensorflow._steps import NOT_POISSON, Steps
from dpaudit.recording import LiveBound

__all__ = ["observe"]

_DIRAC = Dirac()


@with_block
def observe(
    optimizer: Any,
    *,
    canary: GradientCanary = _DIRAC,
    num_canaries: int = 64,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[ObserverRecorder]:
    """Audit the steps that are made inside of the ``with`` block.

    ``optimizer`` is one of TF Privacy's, such as ``DPKerasSGDOptimizer`` or
    ``VectorizedDPKerasAdamOptimizer``. Canaries go through its own clipping, sum and noise; they are taken
    off before the update, so that the weights are those without audit, up to rounding. The noise multiplier
    is read from the optimizer; the sample rate is known to nobody, and has to be given here or to
    ``audit()``. Chance comes from ``seed``, or from the operating system. ``callbacks`` get the live bound
    while the training runs (with ``every`` so many steps); they may raise to end it.
    """
    clip = clip_of(optimizer)
    calls_each = getattr(optimizer, "gradient_accumulation_steps", 1)
    draws = Draws(canary, num_canaries, fresh_seed(seed))
    noise = Noise(clip, calls_each)
    recorder = ObserverRecorder(
        noise.terms,
        Terms(noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta),
        signal=min(canary.scale, 1.0),
        facts=lambda: Facts(canary=canary, max_grad_norm=float(clip.norm)),
        not_covered=(NOT_POISSON,),
        confidence=confidence,
        every=every,
        callbacks=callbacks,
    )
    num_before = int(optimizer.iterations.numpy())
    steps = Steps(recorder, draws, calls_each=calls_each, calls_before=num_before)
    observer = Observer(optimizer, clip=clip, scale=canary.scale, steps=steps, noise=noise)
    observer.attach()
    try:
        yield recorder
    except Exception:
        if observer.raised is None:
            raise
        raise observer.raised from None
    finally:
        observer.detach()
    observer.require_all_seen()

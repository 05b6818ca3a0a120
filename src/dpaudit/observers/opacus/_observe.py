"""The way in: a context around the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

from dpaudit.canaries import Dirac, Draws, GradientCanary, fresh_seed
from dpaudit.errors import InputError
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._terms import Terms
from dpaudit.observers.opacus._clips import Clip, GhostClip, RowClip
from dpaudit.observers.opacus._observer import Observer
from dpaudit.observers.opacus._ranks import ranks_of
from dpaudit.observers.opacus._terms import ReadTerms
from dpaudit.recording import LiveBound

__all__ = ["observe"]

_DIRAC = Dirac()


@contextmanager
def observe(
    optimizer: DPOptimizer,
    *,
    canary: GradientCanary = _DIRAC,
    num_canaries: int = 64,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    loader: Any = None,
    module: Any = None,
    confidence: float = 0.95,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[ObserverRecorder]:
    """Audit the steps that are made inside of the ``with`` block.

    ``optimizer`` is the one that ``make_private`` returned. Canaries go through its own clipping, sum and
    noise; they are taken off before the update, so that the weights are those without audit, up to
    rounding. What the claim is made of is read from the optimizer, its accountant or ``loader``, unless it
    is given here or to ``audit()``. ``module`` is the model, which ghost clipping needs. Chance comes from
    ``seed``, or from the operating system. ``callbacks`` get the live bound while the training runs (with
    ``every`` so many steps); they may raise to end it.
    """
    clip = _clip(optimizer, module)
    ranks = ranks_of(optimizer)
    draws = Draws(canary, num_canaries, ranks.agreed(fresh_seed(seed)))
    terms = ReadTerms(optimizer, loader)
    recorder = ObserverRecorder(
        terms,
        Terms(noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta),
        signal=min(canary.scale, 1.0),
        not_covered=clip.not_covered,
        confidence=confidence,
        every=every,
        callbacks=callbacks,
    )
    observer = Observer(optimizer, recorder, draws=draws, clip=clip, ranks=ranks, terms=terms)
    observer.attach()
    try:
        yield recorder
    finally:
        observer.detach()


def _clip(optimizer: Any, module: Any) -> Clip:
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            "Expected the optimizer that PrivacyEngine.make_private returned, got a "
            f"{type(optimizer).__name__}, which is not private."
        )
    if not isinstance(optimizer, DPOptimizerFastGradientClipping):
        return RowClip(optimizer)
    if not hasattr(module, "get_clipping_coef"):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned: with ghost clipping "
            f"it clips, and not the optimizer; got {type(module).__name__}."
        )
    return GhostClip(optimizer, module)

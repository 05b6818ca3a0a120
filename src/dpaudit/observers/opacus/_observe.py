"""The way in: a context around the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opacus.optimizers import DPOptimizer

from dpaudit._torch import HeldOutData
from dpaudit.canaries import Dirac, GradientCanary, InputCanary, fresh_seed
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._sampled import SampledRecorder
from dpaudit.observers._terms import Terms
from dpaudit.observers._with_block import with_block
from dpaudit.observers.opacus._kinds import require_kind
from dpaudit.observers.opacus._observer import Observer, require_unobserved
from dpaudit.observers.opacus._ranks import ranks_of
from dpaudit.observers.opacus._supported import clip_of
from dpaudit.observers.opacus._ways import Asked, by_inputs, by_sampling, by_steps
from dpaudit.recording import LiveBound

__all__ = ["observe"]

_DIRAC = Dirac()


@with_block
def observe(
    optimizer: DPOptimizer,
    *,
    canary: GradientCanary | InputCanary = _DIRAC,
    held_out: HeldOutData | None = None,
    num_canaries: int | None = None,
    sampling: bool = False,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    loader: Any = None,
    module: Any = None,
    criterion: Callable[..., Any] | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[ObserverRecorder | SampledRecorder]:
    """Audit the steps that are made inside of the ``with`` block.

    ``optimizer`` is the one that ``make_private`` returned. Canaries go through its own clipping, sum and
    noise; they are taken off before the update, so that the weights are those without audit, up to
    rounding. What the claim is made of is read from the optimizer, its accountant or ``loader``, unless it
    is given here or to ``audit()``. ``module`` is the model, which ghost clipping needs. Chance comes from
    ``seed``, or from the operating system. ``callbacks`` get the live bound while the training runs (with
    ``every`` so many steps); they may raise to end it.

    With ``held_out``, the examples that :func:`hold_out` split off, ``canary`` may be an example, such as
    ``Crafted()``. By default 16 of them are present in each step by fair coins, and go through the model and
    the loss too. They need ``module``, ``loader``, among whose data no held-out example may be, and
    ``criterion``, unless that is the cross-entropy.

    By default 64 canaries that are gradients, or as many as a smaller model has parameters, are present in
    each step by fair coins. With ``sampling``, half
    of them are entries of the data set of ``loader``, and its own sampler draws them like examples: so the
    sampling is audited too, after the last step. The batches are others than without audit then, because
    canaries use up chance of the sampler. By default they are as many as the model has parameters, but at
    most 8,192.
    """
    clip, ranks = clip_of(optimizer, module), ranks_of(optimizer, sampling)
    require_unobserved(optimizer)
    require_kind(canary, held_out, criterion, sampling=sampling, several=ranks.world_size > 1)
    given = Terms(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
    )
    asked = Asked(
        optimizer=optimizer,
        canary=canary,
        held_out=held_out,
        num_canaries=num_canaries,
        given=given,
        clip=clip,
        loader=loader,
        module=module,
        criterion=criterion,
        confidence=confidence,
        seed=ranks.agreed(fresh_seed(seed)),
        every=every,
        callbacks=callbacks,
    )
    way = by_inputs(asked) if asked.is_of_inputs else by_sampling(asked) if sampling else by_steps(asked)
    observer = Observer(
        optimizer,
        way.recorder,
        canaries=way.canaries,
        joining=way.joining,
        ranks=ranks,
        terms=way.terms,
    )
    with observer.watching():
        yield way.recorder

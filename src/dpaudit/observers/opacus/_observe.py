"""The way in: a context around the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from opacus.optimizers import DPOptimizer

from dpaudit._torch import HeldOutData
from dpaudit.canaries import Coins as Chance
from dpaudit.canaries import Dirac, Draws, GradientCanary, InputCanary, fresh_seed
from dpaudit.errors import InputError
from dpaudit.observers._facts import Facts
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._sampled import SampledRecorder
from dpaudit.observers._terms import Terms
from dpaudit.observers._with_block import with_block
from dpaudit.observers.opacus._aim import left_out, most_canaries, reached, require_reach, usual_canaries
from dpaudit.observers.opacus._entries import Coins, Entries
from dpaudit.observers.opacus._gradients import GradientCanaries
from dpaudit.observers.opacus._kinds import input_canaries, require_kind
from dpaudit.observers.opacus._look import Canaries
from dpaudit.observers.opacus._observer import Observer, require_unobserved
from dpaudit.observers.opacus._ranks import ranks_of
from dpaudit.observers.opacus._supported import clip_of
from dpaudit.observers.opacus._terms import ReadTerms, accounted_rate
from dpaudit.recording import LiveBound

__all__ = ["observe"]

_DIRAC = Dirac()
_OF_A_STEP, _OF_THE_RUN, _INPUTS = 64, 8192, 16  # canaries


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
    seed = ranks.agreed(fresh_seed(seed))
    facts = partial(_facts, optimizer, canary)
    recorder: ObserverRecorder | SampledRecorder
    if isinstance(canary, InputCanary):
        chance = Chance(_INPUTS if num_canaries is None else num_canaries, seed)
        canaries: Canaries = input_canaries(
            optimizer, canary, chance, module=module, criterion=criterion, data=held_out, loader=loader
        )
        joining, terms = Coins(chance), ReadTerms(optimizer, loader)
        recorder = ObserverRecorder(
            terms,
            given,
            every=every,
            callbacks=callbacks,
            confidence=confidence,
            facts=facts,
            shares_noise=True,
        )
    else:
        if num_canaries is None:
            usual = usual_canaries if sampling else most_canaries
            num_canaries = usual(optimizer, _OF_THE_RUN if sampling else _OF_A_STEP)
        reach = reached(optimizer, num_canaries)
        draws = Draws(canary, num_canaries, seed)
        canaries = GradientCanaries(optimizer, draws, clip)
        common: dict[str, Any] = {
            "signal": min(canary.scale, 1.0),
            "not_covered": clip.not_covered + left_out(reach, num_canaries),
            "confidence": confidence,
            "facts": facts,
        }
        if sampling:
            require_reach(reach, num_canaries)
            _require_no_look(callbacks, every)
            joining = entries = Entries(draws, optimizer, loader, clip)
            terms = ReadTerms(optimizer, None if _knows_rate(optimizer, given) else loader)
            recorder = SampledRecorder(
                terms, given, draws.entries(), reach=reach, finished=entries.require_all, **common
            )
        else:
            joining, terms = Coins(draws), ReadTerms(optimizer, loader)
            recorder = ObserverRecorder(terms, given, every=every, callbacks=callbacks, **common)
    observer = Observer(optimizer, recorder, canaries=canaries, joining=joining, ranks=ranks, terms=terms)
    with observer.watching():
        yield recorder


def _facts(optimizer: DPOptimizer, canary: GradientCanary | InputCanary) -> Facts:
    return Facts(
        canary=canary,
        max_grad_norm=float(optimizer.max_grad_norm),
        batch_size=optimizer.expected_batch_size,
    )


def _require_no_look(callbacks: Sequence[Callable[[LiveBound], None]], every: int | None) -> None:
    for name, given in (("callbacks", callbacks), ("every", every is not None)):
        if given:
            raise InputError(
                f"Expected no {name} with sampling=True: there is no bound before the last step."
            )


def _knows_rate(optimizer: DPOptimizer, given: Terms) -> bool:
    """The rate that is claimed is the accounted one; the loader's is what is audited."""
    return given.sample_rate is not None or accounted_rate(optimizer) is not None

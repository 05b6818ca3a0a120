"""The way in: a context around the training loop.

The three ways to look at a training: gradients in its steps, gradients in its data, examples. From the
description of a canary to what joins the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from dpaudit._torch import HeldOutData, require_fitting
from dpaudit.canaries import Coins as Chance
from dpaudit.canaries import Dirac, Draws, GradientCanary, InputCanary, fresh_seed, require_held_out
from dpaudit.errors import InputError
from dpaudit.observers._patching import with_block
from dpaudit.observers.opacus._clipping import Clip, clip_of
from dpaudit.observers.opacus._gradient_canaries import (
    Canaries,
    GradientCanaries,
    left_out,
    most_canaries,
    reached,
    require_reach,
    usual_canaries,
)
from dpaudit.observers.opacus._input_canaries import (
    GhostPass,
    InputCanaries,
    Model,
    Pass,
    RowPass,
    require_apart,
)
from dpaudit.observers.opacus._observer import (
    Observer,
    ReadTerms,
    accounted_rate,
    ranks_of,
    require_unobserved,
)
from dpaudit.observers.opacus._sampling import Coins, Entries
from dpaudit.recording import (
    DPSGDParams,
    LiveBound,
    NoiseLog,
    ReadClaim,
    Recorder,
    TrainingInfo,
    WholeRunRecorder,
)


def require_kind(
    canary: object, held_out: object, criterion: object, *, sampling: bool, several: bool
) -> None:
    """Gradients need no data; examples need some, and do not work everywhere."""
    if isinstance(canary, GradientCanary):
        given = [name for name, it in (("held_out", held_out), ("criterion", criterion)) if it is not None]
        if given:
            raise InputError(f"Expected no {given[0]} with {canary!r}, which is made from no example.")
        return
    if not isinstance(canary, InputCanary):
        raise InputError(f"Expected canary to be such as Dirac() or Crafted(), got {canary!r}.")
    require_held_out(canary, held_out, HeldOutData)
    if sampling:
        raise InputError(
            f"Expected a canary that is a gradient, such as Dirac(), with sampling=True, got {canary!r}: "
            "scores of whole runs need canaries that are orthogonal."
        )
    if several:
        raise InputError(
            f"Expected one process with {canary!r}, got an optimizer that adds up gradients of several: "
            "observe those with a canary that is a gradient, such as Dirac()."
        )


def input_canaries(
    optimizer: DPOptimizer,
    canary: InputCanary,
    coins: Chance,
    *,
    module: Any,
    criterion: Callable[..., Any] | None,
    data: HeldOutData | None,
    loader: Any,
) -> InputCanaries:
    """Examples for the steps of this optimizer, made from held-out data."""
    if not isinstance(module, nn.Module):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned: it finds the "
            f"gradients of canaries; got {type(module).__name__}."
        )
    assert data is not None  # as require_kind requires
    require_apart(data, loader)
    loss = _criterion(optimizer, criterion)
    require_fitting(module, getattr(loss, "criterion", loss), data)  # what ghost clipping has around a loss
    kind: type[Pass] = GhostPass if isinstance(optimizer, DPOptimizerFastGradientClipping) else RowPass
    own = kind(optimizer, module, loss)
    return InputCanaries(optimizer, canary, coins, model=Model(optimizer, module, loss), own=own, data=data)


def _criterion(optimizer: DPOptimizer, given: Any) -> Any:
    """The loss of the training; cross-entropy unless told otherwise."""
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        if not isinstance(given, DPLossFastGradientClipping):
            raise InputError(
                "Expected criterion=..., the loss that PrivacyEngine.make_private returned: with ghost "
                f"clipping it clips; got {type(given).__name__}."
            )
        return given
    return nn.CrossEntropyLoss(reduction=optimizer.loss_reduction) if given is None else given


_OF_A_STEP, _OF_THE_RUN, _INPUTS = 64, 8192, 16  # canaries


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What the observer was asked for."""

    optimizer: DPOptimizer
    canary: GradientCanary | InputCanary
    held_out: HeldOutData | None
    num_canaries: int | None
    given: DPSGDParams
    clip: Clip
    loader: Any
    module: Any
    criterion: Callable[..., Any] | None
    confidence: float
    seed: int
    every: int | None
    callbacks: Sequence[Callable[[LiveBound], None]]

    @property
    def is_of_inputs(self) -> bool:
        """Whether canaries are examples, and not gradients."""
        return isinstance(self.canary, InputCanary)

    @property
    def gradient(self) -> GradientCanary:
        """The canary, where it is a gradient."""
        assert isinstance(self.canary, GradientCanary)
        return self.canary

    def count(self, usual: Callable[[DPOptimizer, int], int], most: int) -> int:
        """How many canaries there are, if nothing is said as many as is usual."""
        return usual(self.optimizer, most) if self.num_canaries is None else self.num_canaries

    def facts(self) -> TrainingInfo:
        """What tests of the noise have to know."""
        return TrainingInfo(
            canary=self.canary,
            max_grad_norm=float(self.optimizer.max_grad_norm),
            batch_size=self.optimizer.expected_batch_size,
        )


@dataclass(frozen=True, eq=False)
class Way:
    """Who makes canaries, who puts them into the steps, what is claimed, and who records."""

    recorder: Recorder | WholeRunRecorder
    canaries: Canaries
    joining: Coins | Entries
    terms: ReadTerms


def by_inputs(asked: Asked) -> Way:
    """Examples, present in each step by fair coins."""
    assert isinstance(asked.canary, InputCanary)
    chance = Chance(_INPUTS if asked.num_canaries is None else asked.num_canaries, asked.seed)
    canaries = input_canaries(
        asked.optimizer,
        asked.canary,
        chance,
        module=asked.module,
        criterion=asked.criterion,
        data=asked.held_out,
        loader=asked.loader,
    )
    terms = ReadTerms(asked.optimizer, asked.loader)
    recorder = Recorder(
        claim=ReadClaim(terms, asked.given),
        num_steps=asked.given.num_steps,
        every=asked.every,
        callbacks=asked.callbacks,
        confidence=asked.confidence,
        noise=NoiseLog(),
        signal=1.0,
        facts=asked.facts,
        shares_noise=True,
    )
    return Way(recorder, canaries, Coins(chance), terms)


def by_steps(asked: Asked) -> Way:
    """Gradients, present in each step by fair coins."""
    count = asked.count(most_canaries, _OF_A_STEP)
    draws = Draws(asked.gradient, count, asked.seed)
    terms = ReadTerms(asked.optimizer, asked.loader)
    recorder = Recorder(
        claim=ReadClaim(terms, asked.given),
        every=asked.every,
        callbacks=asked.callbacks,
        **_common(asked, count),
    )
    return Way(recorder, GradientCanaries(asked.optimizer, draws, asked.clip), Coins(draws), terms)


def by_sampling(asked: Asked) -> Way:
    """Gradients that are entries of the data, of which the training's own sampler draws."""
    count = asked.count(usual_canaries, _OF_THE_RUN)
    reach = reached(asked.optimizer, count)
    require_reach(reach, count)
    _require_no_look(asked)
    draws = Draws(asked.gradient, count, asked.seed)
    entries = Entries(draws, asked.optimizer, asked.loader, asked.clip)
    terms = ReadTerms(asked.optimizer, None if _knows_rate(asked) else asked.loader)
    recorder = WholeRunRecorder(
        draws.entries(),
        claim=ReadClaim(terms, asked.given),
        reach=reach,
        finished=entries.require_all,
        **_common(asked, count),
    )
    return Way(recorder, GradientCanaries(asked.optimizer, draws, asked.clip), entries, terms)


def _common(asked: Asked, count: int) -> dict[str, Any]:
    """What both recorders of gradients are told."""
    return {
        "num_steps": asked.given.num_steps,
        "noise": NoiseLog(),
        "signal": min(asked.gradient.scale, 1.0),
        "not_covered": asked.clip.not_covered + left_out(reached(asked.optimizer, count), count),
        "confidence": asked.confidence,
        "facts": asked.facts,
    }


def _require_no_look(asked: Asked) -> None:
    for name, given in (("callbacks", asked.callbacks), ("every", asked.every is not None)):
        if given:
            raise InputError(
                f"Expected no {name} with sampling=True: there is no bound before the last step."
            )


def _knows_rate(asked: Asked) -> bool:
    """The rate that is claimed is the accounted one; the loader's is what is audited."""
    return asked.given.sample_rate is not None or accounted_rate(asked.optimizer) is not None


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
) -> Iterator[Recorder | WholeRunRecorder]:
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
    given = DPSGDParams(
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

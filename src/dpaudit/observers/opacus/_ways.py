"""The three ways to look at a training: gradients in its steps, gradients in its data, examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opacus.optimizers import DPOptimizer

from dpaudit._torch import HeldOutData
from dpaudit.canaries import Coins as Chance
from dpaudit.canaries import Draws, GradientCanary, InputCanary
from dpaudit.errors import InputError
from dpaudit.observers._facts import Facts
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._sampled import SampledRecorder
from dpaudit.observers._terms import Terms
from dpaudit.observers.opacus._aim import left_out, most_canaries, reached, require_reach, usual_canaries
from dpaudit.observers.opacus._clips import Clip
from dpaudit.observers.opacus._entries import Coins, Entries
from dpaudit.observers.opacus._gradients import GradientCanaries
from dpaudit.observers.opacus._kinds import input_canaries
from dpaudit.observers.opacus._look import Canaries
from dpaudit.observers.opacus._terms import ReadTerms, accounted_rate
from dpaudit.recording import LiveBound

__all__ = ["Asked", "Way", "by_inputs", "by_sampling", "by_steps"]

_OF_A_STEP, _OF_THE_RUN, _INPUTS = 64, 8192, 16  # canaries


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What the observer was asked for."""

    optimizer: DPOptimizer
    canary: GradientCanary | InputCanary
    held_out: HeldOutData | None
    num_canaries: int | None
    given: Terms
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

    def facts(self) -> Facts:
        """What tests of the noise have to know."""
        return Facts(
            canary=self.canary,
            max_grad_norm=float(self.optimizer.max_grad_norm),
            batch_size=self.optimizer.expected_batch_size,
        )


@dataclass(frozen=True, eq=False)
class Way:
    """Who makes canaries, who puts them into the steps, what is claimed, and who records."""

    recorder: ObserverRecorder | SampledRecorder
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
    recorder = ObserverRecorder(
        terms,
        asked.given,
        every=asked.every,
        callbacks=asked.callbacks,
        confidence=asked.confidence,
        facts=asked.facts,
        shares_noise=True,
    )
    return Way(recorder, canaries, Coins(chance), terms)


def by_steps(asked: Asked) -> Way:
    """Gradients, present in each step by fair coins."""
    count = asked.count(most_canaries, _OF_A_STEP)
    draws = Draws(asked.gradient, count, asked.seed)
    terms = ReadTerms(asked.optimizer, asked.loader)
    recorder = ObserverRecorder(
        terms, asked.given, every=asked.every, callbacks=asked.callbacks, **_common(asked, count)
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
    recorder = SampledRecorder(
        terms,
        asked.given,
        draws.entries(),
        reach=reach,
        finished=entries.require_all,
        **_common(asked, count),
    )
    return Way(recorder, GradientCanaries(asked.optimizer, draws, asked.clip), entries, terms)


def _common(asked: Asked, count: int) -> dict[str, Any]:
    """What both recorders of gradients are told."""
    return {
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

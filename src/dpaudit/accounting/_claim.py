"""Privacy claims about training, as a trade-off curve and as epsilon."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from dpaudit import _validate
from dpaudit.accounting._mechanism import (
    Accounted,
    AnyMechanism,
    DPSGDRun,
    GaussianStep,
    Mechanism,
    Poisson,
    White,
)
from dpaudit.accounting._subsampled import SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.stats import STEP, Claimed, ClaimPart, Hypothesis
from dpaudit.stats.tradeoffs import ApproximateDP, Gaussian, TradeOff


class Claim(Claimed):
    """The claim that a mechanism ran, and with it the mechanism's privacy at ``delta``.

    ``gaussian``, ``dpsgd``, ``accounted``, ``approximate_dp`` and ``curve`` create the mechanisms of
    :mod:`dpaudit.accounting`; the last two claim a curve of any mechanism.

    >>> print(Claim.approximate_dp(epsilon=8.0, delta=1e-5))
    (epsilon, delta)-DP: epsilon = 8 at delta = 1e-05
    """

    def __init__(self, mechanism: Mechanism, *, delta: float) -> None:
        self._mechanism, self._delta = mechanism, _validate.delta(delta)
        run, step = mechanism.run_curve(self._delta), mechanism.step_curve(self._delta)
        self._tradeoff, self._parameter = run if step is None else step
        composed = run[0] if step not in (None, run) else None
        self._training = composed if isinstance(composed, SubsampledGaussian) else None
        delta_part = (ClaimPart(name="delta", value=self._delta),) if mechanism.parts else ()
        self._parts = (*mechanism.parts, *delta_part)

    @classmethod
    def gaussian(cls, *, noise_multiplier: float, delta: float) -> Claim:
        """Claim one Gaussian step with noise of ``noise_multiplier`` times the sensitivity."""
        noise = White(_validate.noise_multiplier(noise_multiplier))
        return cls(GaussianStep(noise=noise), delta=delta)

    @classmethod
    def dpsgd(cls, *, noise_multiplier: float, sample_rate: float, num_steps: int, delta: float) -> Claim:
        """Claim DP-SGD: Gaussian steps with Poisson subsampling.

        ``Observations(..., scores_of=...)`` states what a score is of: "step", one step whose batch always
        contains a present canary; "run", a whole run; "one-run", one run that all scores share. If the batch
        of the observed step contains the canary with a probability, also pass
        ``tradeoff=SubsampledGaussian(probability, 1)`` to :func:`dpaudit.audit`.
        """
        noise = White(_validate.noise_multiplier(noise_multiplier))
        sampling = Poisson(_validate.sample_rate(sample_rate))
        mechanism = DPSGDRun(noise=noise, sampling=sampling, num_steps=_validate.num_steps(num_steps))
        return cls(mechanism, delta=delta)

    @classmethod
    def approximate_dp(cls, *, epsilon: float, delta: float) -> Claim:
        """Claim (epsilon, delta)-DP of the observed output, for any mechanism."""
        epsilon = _validate.at_least("epsilon", epsilon, 0)
        return cls(AnyMechanism(ApproximateDP(), epsilon), delta=delta)

    @classmethod
    def curve(cls, tradeoff: TradeOff, *, parameter: float = 1.0, delta: float) -> Claim:
        """Claim a trade-off curve: a family and a parameter (1 for a ``PiecewiseLinear`` curve as given)."""
        return cls(AnyMechanism(tradeoff, parameter), delta=delta)

    @classmethod
    def accounted(cls, event: Any, *, delta: float) -> Claim:
        """Claim the privacy of a ``dp_accounting.DpEvent``; each observation covers the whole event."""
        return cls(Accounted(event), delta=delta)

    @property
    def mechanism(self) -> Mechanism:
        """What is claimed to have run."""
        return self._mechanism

    @property
    def unit(self) -> str:
        """What privacy is claimed for, such as "example", as sentences name it."""
        return self._mechanism.unit

    @property
    def training(self) -> SubsampledGaussian | None:
        """The curve of the whole training run for a DP-SGD claim, otherwise None."""
        return self._training

    @property
    def delta(self) -> float:
        return self._delta

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        """The numbers of a Gaussian or DP-SGD claim, and who they come from."""
        return self._parts

    def with_sources(self, sources: Mapping[str, tuple[str, str]]) -> Claim:
        """Return the same claim whose numbers have these sources and origins; see :class:`ClaimPart`."""
        claim = copy.copy(self)
        claim._parts = tuple(
            replace(number, source=sources[number.name][0], origin=sources[number.name][1])
            if number.name in sources
            else number
            for number in self._parts
        )
        return claim

    @cached_property
    def epsilon(self) -> float:
        return self._mechanism.epsilon(self._delta)

    @property
    def summary(self) -> str:
        description = self._mechanism.description
        return f"{description}: epsilon = {self.epsilon:.4g} at delta = {self._delta:g}"

    def __str__(self) -> str:
        return self.summary

    def __repr__(self) -> str:
        return f"Claim({self._mechanism.description}, delta={self._delta:g})"

    def curve_of_scores(self, scores_of: str | None, tradeoff: TradeOff | None) -> TradeOff | None:
        training = self._training
        is_composed = isinstance(tradeoff, SubsampledGaussian)
        if training is None or (scores_of is None and is_composed):  # a curve says how many steps it covers
            return tradeoff
        if scores_of is None:
            raise InputError(
                "Expected what each score is of with a claim about DP-SGD: pass "
                'Observations(..., scores_of="step") if each is of one step, "run" if each is of a whole '
                'training run, or "one-run" if all are of one trained model, with one score per canary.'
            )
        if tradeoff is None:
            return None if scores_of == STEP else training
        num_steps = tradeoff.num_steps if isinstance(tradeoff, SubsampledGaussian) else 1
        if num_steps != (1 if scores_of == STEP else training.num_steps):
            raise InputError(
                f"Expected no tradeoff, or one that fits scores_of={scores_of!r}, got {tradeoff!r}, the "
                f"curve of {num_steps} of {training.num_steps} steps."
            )
        return tradeoff

    def hypothesis(self, tradeoff: TradeOff | None) -> Hypothesis:
        family = self._tradeoff if tradeoff is None else tradeoff.at(self._delta)
        if self._training is None:
            epsilon = partial(family.epsilon, delta=self._delta)
            return Hypothesis(family, self._parameter_in(family), epsilon, condition=self._condition(family))
        if isinstance(family, SubsampledGaussian):
            whole_run = (self._training.sample_rate, self._training.num_steps)
            if family.num_steps == 1 and (family.sample_rate, 1) != whole_run:
                return self._sampled_step_hypothesis(family, self._training)
            return self._whole_run_hypothesis(family, self._training)
        return self._step_hypothesis(family, self._training)

    def _whole_run_hypothesis(self, family: SubsampledGaussian, training: SubsampledGaussian) -> Hypothesis:
        tested, claimed = ((f.sample_rate, f.num_steps) for f in (family, training))
        if tested != claimed:
            raise InputError(
                f"Expected a trade-off with the claimed sample_rate={claimed[0]:g} and "
                f"num_steps={claimed[1]}, got sample_rate={tested[0]:g} and num_steps={tested[1]}."
            )
        return Hypothesis(family, self._parameter, partial(family.epsilon, delta=self._delta))

    def _sampled_step_hypothesis(
        self, family: SubsampledGaussian, training: SubsampledGaussian
    ) -> Hypothesis:
        """Return the hypothesis about one step that samples the canary at its own rate."""
        epsilon = partial(training.epsilon, delta=self._delta)
        return Hypothesis(family, self._parameter, epsilon, (_composition_assumption(training),))

    def _step_hypothesis(self, family: TradeOff, training: SubsampledGaussian) -> Hypothesis:
        epsilon = partial(_composed, family=family, training=training, delta=self._delta)
        assumed = (_composition_assumption(training),)
        return Hypothesis(family, self._parameter_in(family), epsilon, assumed, self._condition(family))

    def _parameter_in(self, family: TradeOff) -> float:
        """Return the claimed parameter in terms of ``family``."""
        if family == self._tradeoff:
            return self._parameter
        step = self._tradeoff.epsilon(self._parameter, self._delta) if self._training else self.epsilon
        # epsilons are rounded down, but the claim must not become smaller
        return family.with_epsilon(step * (1 + 1e-9), self._delta)

    def _condition(self, family: TradeOff) -> str | None:
        """Return the condition for refuting the claim if the claim does not imply the tested curve.

        Every claim implies its own (eps, delta)-DP; the curve of another mechanism is an assumption.
        """
        if family == self._tradeoff or isinstance(family, ApproximateDP):
            return None
        return family.assumption(self._delta)


def _composition_assumption(training: SubsampledGaussian) -> str:
    return (
        "epsilon is composed over the claimed steps, assumed Gaussian with Poisson sampling at rate "
        f"{training.sample_rate:g}"
    )


def _composed(bound: float, family: TradeOff, training: SubsampledGaussian, delta: float) -> float:
    """Return the epsilon of the whole training run whose steps have this bound."""
    if isinstance(family, Gaussian):
        return training.epsilon(bound, delta)
    step = family.epsilon(bound, delta)
    # the Gaussian step with that epsilon; for epsilon 0 it is not unique, and the smallest mu is 0
    return training.epsilon(Gaussian().with_epsilon(step, delta), delta) if step > 0 else 0.0

"""Privacy claims about training: a mechanism, the noise that it adds, the examples that it samples, a delta.

Another mechanism, such as correlated noise, is another :class:`Mechanism`; another law of its noise or of its
batches is another :class:`NoiseModel` or :class:`Sampling`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.accounting._claimed_epsilon import DPSGDNumbers, compared
from dpaudit.accounting._pld import epsilon_above, event_curve
from dpaudit.accounting._subsampled import SubsampledGaussian
from dpaudit.diagnostics import CheckResults
from dpaudit.errors import InputError, quoted
from dpaudit.stats import DEFAULT, STEP, ApproximateDP, Claimed, ClaimPart, Gaussian, Hypothesis, TradeOff

EXAMPLE = "example"  # the unit of privacy unless another one is stated


class NoiseModel(Protocol):
    """The law of the noise that a mechanism adds to its releases, in clipping norms."""

    @property
    def std(self) -> float:
        """The standard deviation of each coordinate."""

    def whiten(self, step: int, residuals: FloatArray) -> FloatArray:
        """Return independent standard normal values from the noise of one step, the first of which is 0."""


@dataclass(frozen=True)
class White:
    """Independent Gaussian noise of ``multiplier`` clipping norms in every coordinate and step."""

    multiplier: float

    def __post_init__(self) -> None:
        _validate.noise_multiplier(self.multiplier)

    @property
    def std(self) -> float:
        return self.multiplier

    def whiten(self, step: int, residuals: FloatArray) -> FloatArray:
        del step
        return residuals / self.multiplier


class Sampling(Protocol):
    """How the batch of a step is chosen."""

    @property
    def rate(self) -> float:
        """The probability that a step uses a given example."""


@dataclass(frozen=True)
class Poisson:
    """Each example is in the batch of a step independently, with probability ``rate``."""

    rate: float

    def __post_init__(self) -> None:
        _validate.sample_rate(self.rate)


@dataclass(frozen=True)
class Full:
    """Every step uses all examples."""

    rate: ClassVar[float] = 1.0


class Mechanism(Protocol):
    """The interface of what a :class:`dpaudit.Claim` is about; implementations are frozen values.

    A curve is a trade-off and its parameter at the ``delta`` of a claim.
    """

    unit: str
    """What privacy is claimed for, such as "example", "user" or "client", as sentences name it."""
    noise: NoiseModel | None
    """The noise of each release; None if the mechanism does not say."""
    sampling: Sampling | None
    """How batches are chosen; None if the mechanism does not say."""

    @property
    def description(self) -> str:
        """The mechanism in a few words."""

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        """The numbers of the mechanism; empty if it is not described by numbers."""
        return ()

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the whole run at ``delta``, rounded up where it is computed numerically."""
        tradeoff, parameter = self.run_curve(delta)
        if isinstance(tradeoff, SubsampledGaussian) and parameter > 0 and delta > 0:
            return epsilon_above(1 / parameter, tradeoff.sample_rate, tradeoff.num_steps, delta)
        return tradeoff.epsilon(parameter, delta)

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        """Return the curve of everything that the mechanism releases."""

    def step_curve(self, delta: float) -> tuple[TradeOff, float] | None:  # noqa: ARG002
        """Return the curve of one step that uses the example for certain; None if only the run has one."""
        return None


@dataclass(frozen=True, kw_only=True)
class GaussianStep(Mechanism):
    """One release with Gaussian noise, of all examples."""

    noise: White
    sampling: Full = field(default=Full(), init=False, repr=False)
    unit: str = EXAMPLE

    @property
    def description(self) -> str:
        return f"one Gaussian step, noise multiplier {self.noise.std:g}"

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        return (ClaimPart(name="noise_multiplier", value=self.noise.std),)

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        return _gaussian_curve(self.noise, delta)

    def step_curve(self, delta: float) -> tuple[TradeOff, float]:
        return self.run_curve(delta)


@dataclass(frozen=True, kw_only=True)
class DPSGDRun(Mechanism):
    """DP-SGD: ``num_steps`` releases with independent Gaussian noise, of batches sampled independently."""

    noise: White
    sampling: Poisson | Full
    num_steps: int
    unit: str = EXAMPLE

    def __post_init__(self) -> None:
        _validate.num_steps(self.num_steps)

    @property
    def description(self) -> str:
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps:,} steps"
        return f"DP-SGD, noise multiplier {self.noise.std:g}, sample rate {self.sampling.rate:g}, {steps}"

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        return (
            ClaimPart(name="noise_multiplier", value=self.noise.std),
            ClaimPart(name="sample_rate", value=self.sampling.rate),
            ClaimPart(name="num_steps", value=self.num_steps),
        )

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        _, parameter = _gaussian_curve(self.noise, delta)
        return SubsampledGaussian(self.sampling.rate, self.num_steps), parameter

    def step_curve(self, delta: float) -> tuple[TradeOff, float]:
        return _gaussian_curve(self.noise, delta)


@dataclass(frozen=True)
class Accounted(Mechanism):
    """A ``dp_accounting.DpEvent``; an observation is of the whole event."""

    event: Any
    unit: str = EXAMPLE
    noise: None = field(default=None, init=False, repr=False)
    sampling: None = field(default=None, init=False, repr=False)
    _curves: dict[float, TradeOff] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def description(self) -> str:
        return f"accounted {type(self.event).__name__}"

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        if delta not in self._curves:
            self._curves[delta] = event_curve(self.event, delta)
        return self._curves[delta], 1.0


@dataclass(frozen=True)
class AnyMechanism(Mechanism):
    """Any mechanism with this trade-off curve or a less leaky one."""

    tradeoff: TradeOff
    parameter: float = 1.0
    unit: str = EXAMPLE
    sampling: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tradeoff, TradeOff):
            raise InputError(
                f"The trade-off must be a curve such as Gaussian(), got {quoted(self.tradeoff)}."
            )
        _validate.at_least("parameter", self.parameter, 0)

    @property
    def description(self) -> str:
        is_approximate = isinstance(self.tradeoff, ApproximateDP)
        return "(epsilon, delta)-DP" if is_approximate else f"{self.tradeoff.symbol} = {self.parameter:g}"

    @property
    def noise(self) -> NoiseModel | None:  # type: ignore[override]  # no field: a curve implies it
        is_gaussian = isinstance(self.tradeoff, Gaussian) and self.parameter > 0
        return White(1 / self.parameter) if is_gaussian else None

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        return self.tradeoff.at(delta), self.parameter


def _gaussian_curve(noise: NoiseModel, delta: float) -> tuple[TradeOff, float]:
    if delta == 0:
        raise InputError("delta must be positive, got 0: Gaussian noise has no finite epsilon at delta 0.")
    return Gaussian(), 1 / noise.std


class Claim(Claimed):
    """The claim that a mechanism ran, and with it the mechanism's privacy at ``delta``.

    ``gaussian``, ``dpsgd``, ``accounted``, ``approximate_dp`` and ``curve`` create the mechanisms of
    :mod:`dpaudit.accounting`; the last two claim a curve of any mechanism. An ``epsilon`` beside the
    parameters is the figure that was claimed of them, which :attr:`facts` compares with the accountant.

    >>> print(Claim.approximate_dp(epsilon=8.0, delta=1e-5))
    (epsilon, delta)-DP: epsilon = 8 at delta = 1e-05
    """

    def __init__(self, mechanism: Mechanism, *, delta: float, epsilon: float | None = None) -> None:
        self._mechanism, self._delta = mechanism, _validate.delta(delta)
        self._stated = None if epsilon is None else _validate.positive("epsilon", epsilon)
        run, step = mechanism.run_curve(self._delta), mechanism.step_curve(self._delta)
        self._tradeoff, self._parameter = run if step is None else step
        composed = run[0] if step not in (None, run) else None
        self._training = composed if isinstance(composed, SubsampledGaussian) else None
        delta_part = (ClaimPart(name="delta", value=self._delta),) if mechanism.parts else ()
        stated_part = () if self._stated is None else (ClaimPart(name="epsilon", value=self._stated),)
        self._parts = (*mechanism.parts, *delta_part, *stated_part)

    @classmethod
    def gaussian(cls, *, noise_multiplier: float, delta: float, epsilon: float | None = None) -> Claim:
        """Claim one Gaussian step with noise of ``noise_multiplier`` times the sensitivity."""
        noise = White(_validate.noise_multiplier(noise_multiplier))
        return cls(GaussianStep(noise=noise), delta=delta, epsilon=epsilon)

    @classmethod
    def dpsgd(
        cls,
        *,
        noise_multiplier: float,
        sample_rate: float,
        num_steps: int,
        delta: float,
        epsilon: float | None = None,
    ) -> Claim:
        """Claim DP-SGD: Gaussian steps with Poisson subsampling.

        ``Observations(..., scores_of=...)`` states what a score is of: "step", one step whose batch always
        contains a present canary; "run", a whole run; "one-run", one run that all scores share. If the batch
        of the observed step contains the canary with a probability, also pass
        ``tradeoff=SubsampledGaussian(probability, 1)`` to :func:`dpaudit.audit`.
        """
        noise = White(_validate.noise_multiplier(noise_multiplier))
        sampling = Poisson(_validate.sample_rate(sample_rate))
        mechanism = DPSGDRun(noise=noise, sampling=sampling, num_steps=_validate.num_steps(num_steps))
        return cls(mechanism, delta=delta, epsilon=epsilon)

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
    def accounted(cls, event: Any, *, delta: float, epsilon: float | None = None) -> Claim:
        """Claim the privacy of a ``dp_accounting.DpEvent``; each observation covers the whole event."""
        return cls(Accounted(event), delta=delta, epsilon=epsilon)

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
        vars(claim).pop("facts", None)  # which depend on the sources
        claim._parts = tuple(
            replace(number, source=sources[number.name][0], origin=sources[number.name][1])
            if number.name in sources
            else number
            for number in self._parts
        )
        return claim

    def with_epsilon(self, epsilon: float | None) -> Claim:
        """Return the same claim with the figure that was claimed of its parameters; None changes nothing."""
        if epsilon is None or epsilon == self._stated:
            return self
        if self._stated is not None:
            raise InputError(f"epsilon must be that of the claim, {self._stated:g}, got {epsilon:g}.")
        claim = Claim(self._mechanism, delta=self._delta, epsilon=epsilon)
        return claim.with_sources({number.name: (number.source, number.origin) for number in self._parts})

    @cached_property
    def epsilon(self) -> float:
        return self._mechanism.epsilon(self._delta)

    @cached_property
    def facts(self) -> CheckResults:
        """What contradicts the epsilon that was claimed beside the parameters, if one was."""
        if self._stated is None:
            return CheckResults()
        run, numbers = self._mechanism, None
        if isinstance(run, DPSGDRun | GaussianStep):
            numbers = DPSGDNumbers(
                noise=run.noise.std,
                sample_rate=run.sampling.rate,
                num_steps=getattr(run, "num_steps", 1),
                delta=self._delta,
            )
        is_whole = all(number.source != DEFAULT for number in self._parts)
        return compared(self._stated, self.epsilon, self._delta, numbers, is_whole=is_whole)

    @property
    def refuted_epsilon(self) -> float:
        return math.inf if self._stated is None or not self.facts.certain else self._stated

    @property
    def summary(self) -> str:
        claimed = "" if self._stated is None else f", claimed as {self._stated:.12g}"
        return f"{self._description}: epsilon = {self.epsilon:.4g} at delta = {self._delta:g}{claimed}"

    @property
    def _description(self) -> str:
        protecting = "" if self.unit == EXAMPLE else f", for each {self.unit}"
        return f"{self._mechanism.description}{protecting}"

    def __str__(self) -> str:
        return self.summary

    def __repr__(self) -> str:
        return f"Claim({self._description}, delta={self._delta:g})"

    def curve_of_scores(self, scores_of: str | None, tradeoff: TradeOff | None) -> TradeOff | None:
        training = self._training
        is_composed = isinstance(tradeoff, SubsampledGaussian)
        if training is None or (scores_of is None and is_composed):  # a curve says how many steps it covers
            return tradeoff
        if scores_of is None:
            raise InputError(
                "A claim about DP-SGD needs to know what each score is of: pass Observations(..., "
                "scores_of='step') if each is of one step, 'run' if each is of a whole training run, or "
                "'one-run' if all are of one trained model, with one score per canary."
            )
        if tradeoff is None:
            return None if scores_of == STEP else training
        num_steps = tradeoff.num_steps if isinstance(tradeoff, SubsampledGaussian) else 1
        if num_steps != (1 if scores_of == STEP else training.num_steps):
            raise InputError(
                f"tradeoff must fit scores_of={scores_of!r}, got {tradeoff!r}, the curve of {num_steps} of "
                f"{training.num_steps} steps; leave it out."
            )
        return tradeoff

    def hypothesis(self, tradeoff: TradeOff | None) -> Hypothesis:
        family = self._tradeoff if tradeoff is None else tradeoff.at(self._delta)
        training = self._training
        if training is None:
            epsilon = partial(family.epsilon, delta=self._delta)
            return Hypothesis(family, self._parameter_in(family), epsilon, condition=self._condition(family))
        assumed = (
            "epsilon is composed over the claimed steps, assumed Gaussian with Poisson sampling at rate "
            f"{training.sample_rate:g}",
        )
        if not isinstance(family, SubsampledGaussian):
            epsilon = partial(_composed, family=family, training=training, delta=self._delta)
            return Hypothesis(family, self._parameter_in(family), epsilon, assumed, self._condition(family))
        tested, claimed = ((f.sample_rate, f.num_steps) for f in (family, training))
        if tested == claimed:
            return Hypothesis(family, self._parameter, partial(family.epsilon, delta=self._delta))
        if family.num_steps == 1:  # a step that samples the canary at its own rate
            return Hypothesis(family, self._parameter, partial(training.epsilon, delta=self._delta), assumed)
        raise InputError(
            f"tradeoff must have the claimed sample_rate={claimed[0]:g} and num_steps={claimed[1]}, got "
            f"sample_rate={tested[0]:g} and num_steps={tested[1]}."
        )

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


def _composed(bound: float, family: TradeOff, training: SubsampledGaussian, delta: float) -> float:
    """Return the epsilon of the whole training run whose steps have this bound."""
    if isinstance(family, Gaussian):
        return training.epsilon(bound, delta)
    step = family.epsilon(bound, delta)
    # the Gaussian step with that epsilon; for epsilon 0 it is not unique, and the smallest mu is 0
    return training.epsilon(Gaussian().with_epsilon(step, delta), delta) if step > 0 else 0.0

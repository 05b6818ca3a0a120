"""What a privacy claim is about: a mechanism, the noise that it adds and the examples that it samples.

Another mechanism, such as correlated noise, is another :class:`Mechanism`; another law of its noise or of its
batches is another :class:`NoiseModel` or :class:`Sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.accounting._pld import epsilon_above, event_curve
from dpaudit.accounting._subsampled import SubsampledGaussian
from dpaudit.errors import InputError, quoted
from dpaudit.stats import ApproximateDP, ClaimPart, Gaussian, TradeOff

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

    @property
    def description(self) -> str:
        """The mechanism in a few words."""

    @property
    def unit(self) -> str:
        """What privacy is claimed for, such as "example", "user" or "client", as sentences name it."""

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        """The numbers of the mechanism; empty if it is not described by numbers."""

    @property
    def noise(self) -> NoiseModel | None:
        """The noise of each release; None if the mechanism does not say."""

    @property
    def sampling(self) -> Sampling | None:
        """How batches are chosen; None if the mechanism does not say."""

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the whole run at ``delta``, rounded up where it is computed numerically."""

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        """Return the curve of everything that the mechanism releases."""

    def step_curve(self, delta: float) -> tuple[TradeOff, float] | None:
        """Return the curve of one step that uses the example for certain; None if only the run has one."""


@dataclass(frozen=True, kw_only=True)
class GaussianStep:
    """One release with Gaussian noise, of all examples."""

    noise: White
    sampling: Full = field(default=Full(), init=False, repr=False)
    unit: str = EXAMPLE

    @property
    def description(self) -> str:
        return f"one Gaussian step, noise multiplier {self.noise.std:g}{_protecting(self.unit)}"

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        return (ClaimPart(name="noise_multiplier", value=self.noise.std),)

    def epsilon(self, delta: float) -> float:
        return _epsilon(self.run_curve(delta), delta)

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        _require_delta(delta)
        return Gaussian(), 1 / self.noise.std

    def step_curve(self, delta: float) -> tuple[TradeOff, float]:
        return self.run_curve(delta)


@dataclass(frozen=True, kw_only=True)
class DPSGDRun:
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
        numbers = f"noise multiplier {self.noise.std:g}, sample rate {self.sampling.rate:g}, {steps}"
        return f"DP-SGD, {numbers}{_protecting(self.unit)}"

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        return (
            ClaimPart(name="noise_multiplier", value=self.noise.std),
            ClaimPart(name="sample_rate", value=self.sampling.rate),
            ClaimPart(name="num_steps", value=self.num_steps),
        )

    def epsilon(self, delta: float) -> float:
        return _epsilon(self.run_curve(delta), delta)

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        _require_delta(delta)
        return SubsampledGaussian(self.sampling.rate, self.num_steps), 1 / self.noise.std

    def step_curve(self, delta: float) -> tuple[TradeOff, float]:
        _require_delta(delta)
        return Gaussian(), 1 / self.noise.std


@dataclass(frozen=True)
class Accounted:
    """A ``dp_accounting.DpEvent``; an observation is of the whole event."""

    event: Any
    unit: str = EXAMPLE
    parts: ClassVar[tuple[ClaimPart, ...]] = ()
    noise: ClassVar[None] = None
    sampling: ClassVar[None] = None
    _curves: dict[float, TradeOff] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def description(self) -> str:
        return f"accounted {type(self.event).__name__}{_protecting(self.unit)}"

    def epsilon(self, delta: float) -> float:
        return _epsilon(self.run_curve(delta), delta)

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        if delta not in self._curves:
            self._curves[delta] = event_curve(self.event, delta)
        return self._curves[delta], 1.0

    def step_curve(self, delta: float) -> None:
        del delta


@dataclass(frozen=True)
class AnyMechanism:
    """Any mechanism with this trade-off curve or a less leaky one."""

    tradeoff: TradeOff
    parameter: float = 1.0
    unit: str = EXAMPLE
    parts: ClassVar[tuple[ClaimPart, ...]] = ()
    sampling: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not isinstance(self.tradeoff, TradeOff):
            raise InputError(f"Expected a trade-off curve such as Gaussian(), got {quoted(self.tradeoff)}.")
        _validate.at_least("parameter", self.parameter, 0)

    @property
    def description(self) -> str:
        is_approximate = isinstance(self.tradeoff, ApproximateDP)
        text = "(epsilon, delta)-DP" if is_approximate else f"{self.tradeoff.symbol} = {self.parameter:g}"
        return f"{text}{_protecting(self.unit)}"

    @property
    def noise(self) -> NoiseModel | None:
        is_gaussian = isinstance(self.tradeoff, Gaussian) and self.parameter > 0
        return White(1 / self.parameter) if is_gaussian else None

    def epsilon(self, delta: float) -> float:
        return _epsilon(self.run_curve(delta), delta)

    def run_curve(self, delta: float) -> tuple[TradeOff, float]:
        return self.tradeoff.at(delta), self.parameter

    def step_curve(self, delta: float) -> None:
        del delta


def _epsilon(curve: tuple[TradeOff, float], delta: float) -> float:
    """Return epsilon at ``delta`` of a curve; that of composed steps is rounded up."""
    tradeoff, parameter = curve
    if isinstance(tradeoff, SubsampledGaussian) and parameter > 0 and delta > 0:
        return epsilon_above(1 / parameter, tradeoff.sample_rate, tradeoff.num_steps, delta)
    return tradeoff.epsilon(parameter, delta)


def _protecting(unit: str) -> str:
    return "" if unit == EXAMPLE else f", for each {unit}"


def _require_delta(delta: float) -> None:
    if delta == 0:
        raise InputError("Expected delta > 0, got delta=0: Gaussian noise has no finite epsilon at delta=0.")

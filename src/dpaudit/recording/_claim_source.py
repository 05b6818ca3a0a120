"""The source of a recorder's claim, which is passed in or read from the training run.

A DP-SGD claim consists of four numbers. An observer reads those it can find in the training run; values that
the user passes to the observer or to ``audit()`` complete and override them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, TypeVar

from dpaudit import _validate
from dpaudit.accounting import Claim
from dpaudit.canaries import GradientCanary, InputCanary
from dpaudit.errors import InputError
from dpaudit.stats import DEFAULT, GIVEN, READ, Gaussian, TradeOff

T = TypeVar("T")
_MISSING = {
    "noise_multiplier": "the standard deviation of the noise divided by the clipping norm",
    "sample_rate": "the probability that an example is in a batch, which no loader or accountant reports",
    "num_steps": "the planned number of steps",
    "delta": "such as 1e-5",
}
CLAIM_PARTS = (
    "noise_multiplier=..., sample_rate=... and num_steps=... of the claim (noise_for_epsilon() returns the "
    "noise multiplier of an epsilon)"
)
WHOLE_CLAIM = "claim=Claim.dpsgd(noise_multiplier=..., sample_rate=..., num_steps=..., delta=...)"
SAME_RATE = 0.01  # rates derived from batches and from examples differ by less


@dataclass(frozen=True, kw_only=True)
class DPSGDParams:
    """The four numbers of a claim; None where a number is not known, or not yet known.

    ``epsilon`` is the figure that was claimed beside them.
    ``noises`` are the successive noise multipliers of a run that changed them; none of them is the claim.
    ``origins`` name what each number was read from, such as "the optimizer".
    """

    noise_multiplier: float | None = None
    sample_rate: float | None = None
    num_steps: int | None = None
    delta: float | None = None
    epsilon: float | None = None
    noises: tuple[float, ...] | None = None
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def overridden(self, other: DPSGDParams) -> DPSGDParams:
        """Return these numbers, replaced by those of ``other`` where known."""
        overrides = {name: getattr(other, name) for name in (*_MISSING, "epsilon", "noises")}
        return replace(self, **{name: value for name, value in overrides.items() if value is not None})

    def require_valid(self) -> DPSGDParams:
        """Return these numbers; raise an ``InputError`` if one of them cannot be part of a claim."""
        self._require_noise()
        for name in _MISSING:
            if (value := getattr(self, name)) is not None:
                getattr(_validate, name)(value)
        if self.epsilon is not None:
            _validate.positive("epsilon", self.epsilon)
        return self

    def known(self, *names: str) -> dict[str, Any]:
        """Return the named numbers, by default all four; raise an ``InputError`` that names a missing one."""
        for name in names or _MISSING:
            if getattr(self, name) is None:
                if name == "noise_multiplier" and self.epsilon is not None and not self.noises:
                    _validate.no_epsilon({"epsilon": self.epsilon}, CLAIM_PARTS)
                raise InputError(
                    f"{name} is missing ({self._why_missing(name)}); pass it to the observer or to audit()."
                )
        self._require_noise()
        return {name: getattr(self, name) for name in names or _MISSING}

    def _require_noise(self) -> None:
        if self.noise_multiplier == 0:
            raise InputError(
                "noise_multiplier must be positive, got 0: without noise there is no claim. If the missing "
                "noise is a bug, pass the claimed value to the observer or to audit()."
            )

    def _why_missing(self, name: str) -> str:
        if name == "noise_multiplier" and self.noises:
            return (
                "the claimed one, because the optimizer's noise multiplier changed during the run (from "
                f"{self.noises[0]:g} to {self.noises[-1]:g}) and cannot be read as the claim"
            )
        return _MISSING[name]


@dataclass(frozen=True)
class FrozenValue(Generic[T]):
    """A function that returns what another one returned, in a copy of a recorder that outlives its run."""

    value: T

    def __call__(self) -> T:
        return self.value


@dataclass(frozen=True, kw_only=True)
class TrainingInfo:
    """Numbers of a training run that may show up in the scores of a faulty one and hint at the cause."""

    canary: GradientCanary | InputCanary
    max_grad_norm: float | None = None
    batch_size: float | None = None

    @property
    def canary_scale(self) -> float | None:
        """The norm of the canary in clipping norms; None for an input canary, whose norm is not chosen."""
        return self.canary.scale if isinstance(self.canary, GradientCanary) else None


UNKNOWN = DPSGDParams()


class UntestedError(InputError):
    """There is no noise to test, or the tests would not have their stated error rate."""


class ReadClaim:
    """A DP-SGD claim with parameters ``read`` from the training run; ``given`` takes precedence.

    Numbers that are given are checked at once, not after hours of training. If the number of steps is
    unknown, the claim covers the recorded steps. A ``fixed`` claim is known before the first step.
    """

    def __init__(
        self, read: Callable[[], DPSGDParams], given: DPSGDParams = UNKNOWN, *, fixed: Claim | None = None
    ) -> None:
        self._read, self._given, self._fixed = read, given.require_valid(), fixed
        self._claims: dict[tuple[DPSGDParams, tuple[str, ...]], Claim] = {}  # epsilons are computed once

    @classmethod
    def of(cls, claim: Claim | ReadClaim) -> ReadClaim:
        """Return the source of a claim, which may be the claim itself."""
        if isinstance(claim, ReadClaim):
            return claim
        if not isinstance(claim, Claim):
            raise InputError(f"claim must be a Claim such as Claim.gaussian(...), got {claim!r}.")
        rate = None if claim.training is None else claim.training.sample_rate
        numbers = DPSGDParams(noise_multiplier=claimed_noise(claim), sample_rate=rate)
        return cls(FrozenValue(numbers), fixed=claim)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": FrozenValue(self._read())}

    def overrides(self, **numbers: Any) -> DPSGDParams:
        """Return the numbers of a claim that were passed to ``audit()``; raise if the claim is fixed."""
        passed = {name: number for name, number in numbers.items() if number is not None}
        if self._fixed is not None and (excess := [name for name in _MISSING if name in passed]):
            raise InputError(
                f"{excess[0]} cannot be passed, because this recorder has a whole claim ({self._fixed}); "
                f"pass {WHOLE_CLAIM} instead."
            )
        return DPSGDParams(**passed)

    def params(self, num_done: int, overrides: DPSGDParams = UNKNOWN) -> DPSGDParams:
        """Return the parameters known so far."""
        params = self._read().overridden(self._given).overridden(overrides)
        return DPSGDParams(num_steps=num_done or None).overridden(params)

    def claim(self, num_done: int, overrides: DPSGDParams = UNKNOWN, *, may_be_longer: bool = False) -> Claim:
        """Return the claim about a run with ``num_done`` steps so far; ``overrides`` take precedence.

        Raise an ``InputError`` if the run is longer than claimed, unless it ``may_be_longer``.
        """
        if self._fixed is not None:
            return self._fixed.with_epsilon(overrides.epsilon)
        params = self.params(num_done, overrides)
        if params.num_steps is not None and num_done > params.num_steps and not may_be_longer:
            raise InputError(
                f"Training ran for {num_done} steps, but the claim covers num_steps={params.num_steps}: a "
                "longer run has a larger epsilon."
            )
        sources = self._sources(overrides)
        key = params, tuple(source for source, _ in sources.values())
        if key not in self._claims:
            # of a run that changed its noise, epsilon is composed of all of it
            epsilon = None if params.noises else params.epsilon
            self._claims[key] = Claim.dpsgd(**params.known(), epsilon=epsilon).with_sources(sources)
        return self._claims[key]

    def _sources(self, overrides: DPSGDParams) -> dict[str, tuple[str, str]]:
        """Return the source of each number: given here or to ``audit()``, read, or the default."""
        read, explicit = self._read(), self._given.overridden(overrides)
        sources = {}
        for name in _MISSING:
            if getattr(explicit, name) is not None:
                sources[name] = GIVEN, ""
            elif getattr(read, name) is not None:
                sources[name] = READ, read.origins.get(name, "the training run")
            else:
                sources[name] = DEFAULT, "the number of recorded steps"
        return sources

    @property
    def is_gaussian(self) -> bool:
        """Whether the claim is about Gaussian noise, which can be tested."""
        return self._fixed is None or claimed_noise(self._fixed) is not None

    def noise_multiplier(self, override: float | None) -> float:
        """Return the noise multiplier to test noise against: the override, else the claimed one."""
        if not self.is_gaussian:
            raise UntestedError(
                f"The noise can only be tested against a claim about Gaussian noise, got {self._fixed}."
            )
        params = self.params(0, DPSGDParams(noise_multiplier=override)).known("noise_multiplier")
        return float(params["noise_multiplier"])

    def sample_rate(self) -> float | None:
        """Return the claimed sample rate to test batches against, if it is known."""
        return self.params(0).sample_rate

    def step_curve(self, tradeoff: TradeOff | None) -> tuple[TradeOff, float | None]:
        """Return the curve of a step at the claim's delta, and its claimed parameter if known by now."""
        try:
            claim = self.claim(1)
        except InputError:  # a part of the claim is not known yet
            params = self.params(1)
            if tradeoff is None:
                return Gaussian(), 1 / params.noise_multiplier if params.noise_multiplier else None
            return tradeoff if params.delta is None else tradeoff.at(params.delta), None
        hypothesis = claim.hypothesis(tradeoff)
        return hypothesis.tradeoff.at(claim.delta), hypothesis.parameter

    def remarks(self, overrides: DPSGDParams) -> tuple[str, ...]:
        """Return contradictions between claim and training run that per-step scores do not reveal."""
        read, stated = self._read(), self._given.overridden(overrides)
        remarks = []
        if read.noises and stated.epsilon is not None:
            remarks.append(
                f"the claimed epsilon {stated.epsilon:.12g} is not compared with the parameters: the noise "
                "multiplier changed during the run"
            )
        rate, claimed = read.sample_rate, stated.sample_rate
        if rate is None or claimed is None or math.isclose(rate, claimed, rel_tol=SAME_RATE):
            return tuple(remarks)
        return (
            *remarks,
            f"the claimed sample_rate={claimed:g} differs from the {rate:g} of the training run: epsilon is "
            "computed from the claimed rate, which per-step scores do not test",
        )


def claimed_noise(claim: object) -> float | None:
    """Return the claimed noise multiplier, if the claim states Gaussian noise."""
    noise = claim.mechanism.noise if isinstance(claim, Claim) else None
    return None if noise is None else noise.std


def no_replay(*_: Any, **__: Any) -> NoReturn:
    """Raise where no training step is known that could run again."""
    raise InputError(
        "replay() runs a step of Opacus after the with block of its observer, or one of JAX Privacy; for "
        "other steps use dpaudit.observers.step.replay()."
    )

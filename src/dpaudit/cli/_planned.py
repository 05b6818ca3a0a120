"""What ``dpaudit plan`` is asked, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from dpaudit import _validate
from dpaudit.accounting import Claim
from dpaudit.cli._claim import ClaimOptions
from dpaudit.errors import InputError
from dpaudit.stats import (
    Betting,
    ClopperPearson,
    Inference,
    JointExact,
    Leak,
    Plan,
    Power,
    plan_canaries,
    plan_steps,
    smallest_leak,
)
from dpaudit.stats._bound import plain

__all__ = ["Findable", "PlanOptions", "Planned"]

_METHODS: tuple[Inference, ...] = (ClopperPearson(), JointExact(), Betting())
_MORE_CANARIES = (8, 64, 512)
_EXPECTED = (
    "Expected either a leak to find (--noise-factor or --true-epsilon) or a size (--observations, or --steps "
    "and --canaries)"
)


@dataclass(frozen=True)
class Findable:
    """The smallest leak that a method finds from so many scores."""

    inference: Inference
    num_steps: int
    num_canaries: int
    leak: Power

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "inference": repr(self.inference),
            "num_steps": self.num_steps,
            "num_canaries": self.num_canaries,
            "num_observations": self.num_steps * self.num_canaries,
            "leak": self.leak.to_dict(),
        }


@dataclass(frozen=True)
class Planned:
    """Sizes that find a leak, or the leaks that a size finds."""

    claim: Claim
    confidence: float
    power: float
    plans: tuple[Plan, ...] = ()
    leaks: tuple[Findable, ...] = ()

    @property
    def is_found(self) -> bool:
        """Whether any method can do it."""
        sizes = any(plan.num_observations is not None for plan in self.plans)
        return sizes or any(one.leak.parameter < float("inf") for one in self.leaks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "claim": {
                "summary": self.claim.summary,
                "epsilon": plain(self.claim.epsilon),
                "delta": self.claim.delta,
            },
            "confidence": self.confidence,
            "power": self.power,
            "plans": [plan.to_dict() for plan in self.plans],
            "smallest_leaks": [one.to_dict() for one in self.leaks],
        }


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``dpaudit plan`` as they were given."""

    claimed: ClaimOptions
    noise_factor: float | None
    true_epsilon: float | None
    observations: int | None
    steps: int | None
    canaries: int | None
    power: float
    confidence: float

    def check(self) -> None:
        """Find mistakes in the options before it is said that anything is planned."""
        claim, leak = self.claimed.required, self._leak()
        if leak is None:
            self._size()
        elif self.claimed.epsilon is not None:  # of a noise an accountant has to tell, which may take long
            leak.parameter(claim, claim.hypothesis(None))
        _validate.fraction("power", self.power)
        _validate.confidence(self.confidence)

    def planned(self) -> Planned:
        """The answer."""
        leak = self._leak()
        if leak is None:
            return self._planned(leaks=self._findable(*self._size()))
        return self._planned(plans=(*self._by_steps(leak), *self._by_canaries(leak)))

    def _planned(self, plans: tuple[Plan, ...] = (), leaks: tuple[Findable, ...] = ()) -> Planned:
        return Planned(self.claimed.required, self.confidence, self.power, plans, leaks)

    def _leak(self) -> Leak | None:
        named = {"--observations": self.observations, "--steps": self.steps, "--canaries": self.canaries}
        sizes = [_validate.whole(name, size) for name, size in named.items() if size is not None]
        if self.noise_factor is None and self.true_epsilon is None:
            if not sizes:
                raise InputError(f"{_EXPECTED}, got neither.")
            return None
        if self.observations is not None or len(sizes) > 1:
            raise InputError(f"{_EXPECTED}, got both.")
        if self.noise_factor is not None and self.true_epsilon is not None:
            raise InputError("Expected one leak to find, got both --noise-factor and --true-epsilon.")
        return Leak(noise_factor=self.noise_factor, epsilon=self.true_epsilon)

    def _size(self) -> tuple[int, int]:
        """Steps, and canaries a step and side."""
        if self.observations is not None and self.steps is None and self.canaries is None:
            return self.observations, 1
        if self.observations is None and self.steps is not None and self.canaries is not None:
            return self.steps, self.canaries
        raise InputError("Expected as the size either --observations, or --steps and --canaries.")

    def _findable(self, num_steps: int, num_canaries: int) -> tuple[Findable, ...]:
        find = partial(
            smallest_leak,
            self.claimed.required,
            num_steps=num_steps,
            num_canaries=num_canaries,
            power=self.power,
            confidence=self.confidence,
            tradeoff=self.claimed.tradeoff,
        )
        return tuple(Findable(m, num_steps, num_canaries, find(inference=m)) for m in _METHODS)

    def _by_steps(self, leak: Leak) -> list[Plan]:
        """All methods with one score a step and side; betting also with more."""
        steps = partial(
            plan_steps,
            self.claimed.required,
            leak,
            power=self.power,
            confidence=self.confidence,
            tradeoff=self.claimed.tradeoff,
        )
        if self.steps is not None:
            return []
        if self.canaries is not None:
            return [steps(inference=method, num_canaries=self.canaries) for method in _METHODS]
        single = [steps(inference=method, num_canaries=1) for method in _METHODS]
        return single + [steps(inference=Betting(), num_canaries=more) for more in _MORE_CANARIES]

    def _by_canaries(self, leak: Leak) -> list[Plan]:
        """How many canaries in the steps that were named, or else in those of the claim."""
        num_steps = self.steps
        if num_steps is None and self.canaries is None and self.claimed.is_of_steps:
            num_steps = self.claimed.num_steps
        if num_steps is None:
            return []
        canaries = partial(
            plan_canaries,
            self.claimed.required,
            leak,
            num_steps=num_steps,
            power=self.power,
            confidence=self.confidence,
            tradeoff=self.claimed.tradeoff,
        )
        return [canaries(inference=method) for method in (JointExact(), Betting())]

"""The trainings of ``dpaudit demo``: simulated scores of a correct one and of one with too little noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit.accounting import Claim
from dpaudit.stats import Observations, Result, Verdict, audit

__all__ = ["NOTICE", "SETTING", "Audited", "Demo", "simulate"]

# the paper's WRN-16 on CIFAR-10 at epsilon 8
SETTING: dict[str, Any] = {
    "noise_multiplier": 2.577,
    "sample_rate": 4096 / 50000,
    "num_steps": 2500,
    "delta": 1e-5,
}
_NUM_CANARIES, _SEED = 64, 20230215
NOTICE = (
    "The scores are simulated: no model was trained. They are what 64 gradient canaries a step and side "
    "would show in the paper's setting, 2,500 steps of DP-SGD with noise multiplier 2.577."
)


@dataclass(frozen=True)
class Audited:
    """One training and its audit."""

    name: str
    noise_factor: float
    expected: Verdict
    result: Result

    @property
    def is_as_expected(self) -> bool:
        """Whether the audit said what is known to be true."""
        return self.result.verdict is self.expected

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "noise_factor": self.noise_factor,
            "expected": self.expected.name,
            "as_expected": self.is_as_expected,
            **self.result.to_dict(),
        }


@dataclass(frozen=True)
class Demo:
    """All trainings of the demonstration."""

    trainings: tuple[Audited, ...]

    @property
    def is_as_expected(self) -> bool:
        """Whether every audit said what is known to be true."""
        return all(training.is_as_expected for training in self.trainings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "simulated": True,
            "notice": NOTICE,
            "setting": {**SETTING, "num_canaries": _NUM_CANARIES, "seed": _SEED},
            "as_expected": self.is_as_expected,
            "trainings": [training.to_dict() for training in self.trainings],
        }


def simulate() -> Demo:
    """Both trainings, audited against the same claim."""
    claim = Claim.dpsgd(**SETTING)
    rng = np.random.default_rng(_SEED)
    kinds = (
        ("a correct training", 1.0, Verdict.NO_VIOLATION),
        ("its twin with 0.8 of the noise", 0.8, Verdict.VIOLATION),
    )
    return Demo(
        tuple(
            Audited(name, factor, expected, audit(_scores(rng, factor), claim=claim))
            for name, factor, expected in kinds
        )
    )


def _scores(rng: np.random.Generator, noise_factor: float) -> Observations:
    """White-box scores in units of the canary's signal: N(present, noise^2)."""
    noise = noise_factor * SETTING["noise_multiplier"]
    size = SETTING["num_steps"], _NUM_CANARIES
    return Observations(
        with_canary=1 + noise * rng.standard_normal(size),
        without_canary=noise * rng.standard_normal(size),
        normalized=True,
    )

"""The paper's three violations at its claim of epsilon = 1.27, by bounds that the fault cannot fool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dpaudit.canaries import Dirac
from dpaudit.stats import Betting, ClopperPearson, audit
from dpaudit.training import faults
from dpaudit.zoo import judge
from dpaudit.zoo._entry import EPSILON, noise_of
from dpaudit.zoo._native import NativeTraining

HEAD = ["violation", "steps", "canaries", "bets", "pooled counts", "tests of the noise"]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Case:
    """A violation, and whether scores of a step depend on each other because of it."""

    name: str
    specimen: NativeTraining
    is_dependent: bool = False

    def measured(self, seed: int = 0) -> dict[str, Any]:
        """What each kind of bound says at 95 %, and the tests of the noise at 99 %."""
        evidence = self.specimen(True, seed)
        scores, num_steps = evidence.scores, evidence.num_steps
        bounds = {
            name: audit(
                scores.first(num_steps), claim=evidence.claim, confidence=CONFIDENCE, inference=inference
            ).bound.epsilon
            for name, inference in (("bets", Betting(horizon=num_steps)), ("pooled", ClopperPearson()))
        }
        findings = judge(evidence).diagnosis.findings
        return {**bounds, "findings": [finding.name for finding in findings]}

    def row(self, found: dict[str, Any]) -> list[str]:
        """A line of the page; what is above the claim is bold."""
        bets, pooled = (
            f"**{found[name]:.3g}**" if found[name] > EPSILON else f"{found[name]:.3g}"
            for name in ("bets", "pooled")
        )
        size = f"{self.specimen.num_steps:,}", f"{self.specimen.num_canaries:,}"
        mark = " (not valid here)" if self.is_dependent else ""
        return [self.name, *size, bets, pooled + mark, ", ".join(found["findings"])]


def _noise_for(epsilon: float, **options: int) -> NativeTraining:
    mechanism = partial(faults.NoiseTooSmall, factor=noise_of(epsilon) / noise_of(EPSILON))
    return NativeTraining(mechanism=mechanism, num_steps=500, **options)


_AFTER_MEAN = NativeTraining(mechanism=faults.ClippedAfterMean, canary=Dirac(scale=30.0), num_steps=500)

CASES = (
    Case("1: the mean is clipped", _AFTER_MEAN, is_dependent=True),
    Case("1: the mean is clipped", replace(_AFTER_MEAN, num_steps=2000), is_dependent=True),
    Case(
        "2: noise of 100 seeds", NativeTraining(mechanism=faults.FewSeeds, num_steps=500), is_dependent=True
    ),
    Case("3: noise for 1.57", _noise_for(1.57)),
    Case("3: noise for 1.35", _noise_for(1.35, num_canaries=1200)),
)

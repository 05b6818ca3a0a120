"""The paper's three violations of its claim of epsilon = 1.27, with bounds that hold despite the fault."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dpaudit.stats import Betting, ClopperPearson, Gaussian, audit
from dpaudit.training import broken
from dpaudit.zoo import ENTRIES, judge

EPSILON, DELTA = 1.27, 1e-5
HEAD = ["violation", "steps", "canaries", "betting", "pooled counts", "noise tests"]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Case:
    """A violation, and whether it makes the scores of a step dependent."""

    name: str
    scenario: Any  # a training run of the native engine, as in the zoo
    is_dependent: bool = False

    def measured(self, seed: int = 0) -> dict[str, Any]:
        """Return each kind of bound at 95 % confidence, and the findings of the noise tests at 99 %."""
        evidence = self.scenario(True, seed)
        scores, num_steps = evidence.scores, evidence.num_steps
        bounds = {
            name: audit(
                scores.first(num_steps), claim=evidence.claim, confidence=CONFIDENCE, inference=inference
            ).bound.epsilon
            for name, inference in (("bets", Betting(horizon=num_steps)), ("pooled", ClopperPearson()))
        }
        findings = judge(evidence).diagnosis.findings
        return {**bounds, "findings": [finding.name for finding in findings]}

    def row(self, measured: dict[str, Any]) -> list[str]:
        """Return a row of the table, with bounds above the claim in bold."""
        bets, pooled = (
            f"**{measured[name]:.3g}**" if measured[name] > EPSILON else f"{measured[name]:.3g}"
            for name in ("bets", "pooled")
        )
        size = f"{self.scenario.num_steps:,}", f"{self.scenario.num_canaries:,}"
        mark = " (not valid here)" if self.is_dependent else ""
        return [self.name, *size, bets, pooled + mark, ", ".join(measured["findings"])]


def _noise_for(epsilon: float, **options: int) -> Any:
    used, claimed = (1 / Gaussian().with_epsilon(value, DELTA) for value in (epsilon, EPSILON))
    return replace(_FEW_SEEDS, mechanism=partial(broken.NoiseTooSmall, factor=used / claimed), **options)


_SCENARIOS: dict[str, Any] = {entry.name: entry.scenario for entry in ENTRIES}
_AFTER_MEAN = replace(_SCENARIOS["clip-after-mean"], num_steps=500)
_FEW_SEEDS = replace(_SCENARIOS["noise-100-seeds"], num_steps=500)

CASES = (
    Case("1: the mean is clipped", _AFTER_MEAN, is_dependent=True),
    Case("1: the mean is clipped", replace(_AFTER_MEAN, num_steps=2000), is_dependent=True),
    Case("2: noise from 100 seeds", _FEW_SEEDS, is_dependent=True),
    Case("3: noise calibrated to 1.57", _noise_for(1.57)),
    Case("3: noise calibrated to 1.35", _noise_for(1.35, num_canaries=1200)),
)

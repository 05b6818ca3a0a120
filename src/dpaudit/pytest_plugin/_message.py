"""What a developer reads when an audit fails the test."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from dpaudit.diagnostics import Diagnosis, likely_causes
from dpaudit.pytest_plugin._session import Audits
from dpaudit.recording import Recorder
from dpaudit.stats import Gaussian, Result, Verdict

__all__ = ["Seen", "failure"]


@dataclass(frozen=True)
class Seen:
    """Noise and signal as the scores show them, in clipping norms. Estimates, no part of the proof."""

    noise: float
    signal: float
    low: float  # of the noise
    high: float
    canary_scale: float | None = None
    batch_size: float | None = None
    max_grad_norm: float | None = None

    @classmethod
    def of(cls, recorder: Recorder, **known: float | None) -> Seen:
        """From all scores of a run."""
        seen = recorder.observations
        absent = seen.without_canary
        square, count = float(np.mean(absent**2)), absent.size
        low, high = (math.sqrt(square * count / stats.chi2.ppf(level, count)) for level in (0.975, 0.025))
        return cls(math.sqrt(square), float(seen.with_canary.mean()), low, high, **known)

    def ratio(self, claimed: float) -> str:
        """How far the noise is off."""
        if self.noise == 0:
            return "none at all"
        low, high = self.low / claimed, self.high / claimed
        return f"{self.noise / claimed:.3g} of the claimed ({low:.3g} to {high:.3g})"

    def causes(self, claimed: float) -> tuple[str, ...]:
        """What such numbers come from. Too much noise is the cause of no leak."""
        ratio, interval = self.noise / claimed, (self.low / claimed, self.high / claimed)
        return likely_causes(
            ratio if interval[1] < 1 else None,
            interval=interval,
            signal=self.signal,
            canary_scale=self.canary_scale,
            batch_size=self.batch_size,
            noise_multiplier=claimed,
            max_grad_norm=self.max_grad_norm,
        )


def failure(
    result: Result, diagnosis: Diagnosis | None, seen: Seen | None, audits: Audits, repeat: str
) -> str:
    """Claim, bound, how far the noise is off, findings, what may be the cause, and how to see it again."""
    refuted = result.verdict is Verdict.VIOLATION
    findings = () if diagnosis is None else diagnosis.findings
    claimed = 1 / result.hypothesis.parameter if isinstance(result.hypothesis.tradeoff, Gaussian) else None
    lines = [f"dpaudit: {result.sentence}" if refuted else "dpaudit: the noise is not what the claim says."]
    lines += [f"  claim: {result.claim.summary}", f"  bound: {result.bound.statement}"]
    lines += [f"  {_shared(audits)}"]
    if seen is not None and claimed is not None:
        lines += [
            f"  noise: {seen.ratio(claimed)}",
            f"  canary: arrives with {seen.signal:.3g} clipping norms; a clipped one has at most 1",
        ]
    lines += [f"  found: {finding}" for finding in findings]
    lines += [f"  cause? {text}" for text in _causes(diagnosis, seen, claimed)]
    return "\n".join([*lines, f"  again: {repeat}"])


def _shared(audits: Audits) -> str:
    count = audits.num_tests
    tests = "1 test" if count == 1 else f"{count} tests"
    return f"session: {100 * audits.confidence:g} % confidence, shared between {tests} with audits"


def _causes(diagnosis: Diagnosis | None, seen: Seen | None, claimed: float | None) -> tuple[str, ...]:
    """What the scores say; else what the most certain finding says: the others often follow from it."""
    of_scores = () if seen is None or claimed is None else seen.causes(claimed)
    if of_scores or diagnosis is None:
        return of_scores
    return likely_causes(findings=[finding.name for finding in diagnosis.findings[:1]])

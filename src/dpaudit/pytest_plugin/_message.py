"""The message of a failed audit: the claim, the bound, findings and likely causes.

``FailureMessage`` composes it; ``ScoreSummary`` estimates noise and signal from the scores of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import SubsampledGaussian
from dpaudit.canaries import Mixed
from dpaudit.diagnostics import Diagnosis, likely_causes
from dpaudit.diagnostics._causes import LOCALIZING
from dpaudit.pytest_plugin._session import AuditCall, AuditSession
from dpaudit.recording import Recorder, TrainingInfo
from dpaudit.stats import Gaussian, Result, Verdict

_LEVELS = 0.9995, 0.0005  # quantiles of the noise interval, which is wide to avoid false hints
_MIN_STEPS = 30  # needed to decide whether the signal depends on the number of present canaries
_CERTAIN = 6.0  # standard errors
_CROWDED = 0.2  # smallest relative change of the signal if the number of present canaries doubles


@dataclass(frozen=True)
class FailureMessage:
    """The messages of one call: why it failed its test, how the error rate is shared, and how to rerun it."""

    session: AuditSession
    call: AuditCall
    own_confidence: float | None = None

    @property
    def error_rate(self) -> float:
        """The probability of a false alarm allotted to this call."""
        confidence = self.session.confidence if self.own_confidence is None else self.own_confidence
        return self.call.error_share * (1 - confidence)

    def failure(
        self,
        result: Result,
        diagnosis: Diagnosis | None,
        scores: ScoreSummary | None,
        remarks: Sequence[str] = (),
    ) -> str:
        """Return the message for a refuted claim: bound, estimated noise, findings, and likely causes."""
        claimed = claimed_noise(result)
        lines = [f"claim: {result.claim.summary}", f"bound: {result.bound.statement}"]
        if result.estimate.noise is not None:
            lines.append(f"estimate: {result.estimate.noise}")
        lines += [self._session_line, *remarks]
        if scores is not None:
            lines += [scores.noise_line(claimed), scores.canary_line]
        lines += _finding_lines(diagnosis)
        causes = _likely_causes(diagnosis, {} if scores is None else scores.known(claimed))
        return self._text(_title(result, diagnosis), lines, causes)

    def no_verdict(self, why: str, gap: float | None, facts: TrainingInfo | None) -> str:
        """Return the message for an audit without a verdict, with likely causes."""
        causes: tuple[str, ...] = ()
        if gap is not None and facts is not None:
            scale, batch_size = facts.canary_scale, facts.batch_size
            causes = likely_causes(signal=gap, canary_scale=scale, batch_size=batch_size)
        return self._text("no verdict.", [f"reason: {why}"], causes)

    def findings(self, diagnosis: Diagnosis) -> str:
        """Return the message for findings of tests on data that the developer has added."""
        lines = [self._session_line, *_finding_lines(diagnosis)]
        return self._text("the training run does not match its claim.", lines, _likely_causes(diagnosis, {}))

    def _text(self, title: str, lines: Sequence[str], causes: Sequence[str]) -> str:
        call = "" if self.call.number == 1 else f" (call {self.call.number} of the test)"
        lines = [*lines, *(f"possible cause: {cause}" for cause in causes), *self._rerun_lines]
        return "\n".join([f"dpaudit{call}: {title}", *(f"  {line}" for line in lines)])

    @property
    def _session_line(self) -> str:
        count = self.session.num_tests
        tests = "1 test that uses" if count == 1 else f"{count} tests that use"
        return f"session: {100 * self.session.confidence:g} % joint confidence for {tests} dp_audit"

    @property
    def _rerun_lines(self) -> list[str]:
        lines = [f"rerun: {self.call.rerun}"]
        if self.own_confidence is not None and self.session.num_tests > 1:
            lines.append("(rerun alone, a call with its own confidence= does not share it with other tests)")
        return lines


def _title(result: Result, diagnosis: Diagnosis | None) -> str:
    if result.verdict is Verdict.VIOLATION:
        return (
            f"epsilon >= {result.bound.epsilon:.3g}, but {result.claim.epsilon:.3g} is claimed. "
            f"{result.sentence}"
        )
    first = diagnosis.findings[0].name if diagnosis is not None else ""
    return f"{first}: the noise does not match the claim."


def _finding_lines(diagnosis: Diagnosis | None) -> list[str]:
    return [] if diagnosis is None else [f"finding: {finding}" for finding in diagnosis.findings]


def _likely_causes(diagnosis: Diagnosis | None, known: dict[str, Any]) -> tuple[str, ...]:
    """Guess causes from the scores and the most significant finding: the others often follow from it.

    The total amount of noise adds nothing once it is known where noise is missing.
    """
    names = [] if diagnosis is None else [finding.name for finding in diagnosis.findings]
    if LOCALIZING.intersection(names):
        names = [name for name in names if name != "noise-variance"]
        known = {name: value for name, value in known.items() if name != "noise_ratio"}
    elif diagnosis is not None and diagnosis.noise is not None and "noise-variance" in names:
        amount = diagnosis.noise  # over all coordinates, while scores cover only some
        known = {**known, "noise_ratio": amount.ratio, "interval": (amount.low, amount.high)}
    return likely_causes(**known, findings=names[:1])


@dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """Noise and signal in clipping norms, estimated from the scores; the bound does not rest on them."""

    noise: float
    low: float  # lower end of the interval for the noise
    high: float
    signal: float
    spread_signal: float | None
    is_crowded: bool
    facts: TrainingInfo | None

    @classmethod
    def of(cls, recorder: Recorder) -> ScoreSummary:
        """Summarize all scores of a run."""
        state, facts = recorder.state_dict(), recorder.facts
        scores, present = state["scores"], state["present"]
        absent = scores[~present]
        square, count = float(np.mean(absent**2)), absent.size
        low, high = (math.sqrt(square * count / stats.chi2.ppf(level, count)) for level in _LEVELS)
        narrow, spread = _signals(scores, present, facts)
        return cls(
            noise=math.sqrt(square),
            low=low,
            high=high,
            signal=narrow,
            spread_signal=spread,
            is_crowded=_is_crowded(scores, present),
            facts=facts,
        )

    def noise_line(self, claimed: float | None) -> str:
        """Return the noise in clipping norms, or relative to the claim."""
        if self.noise == 0:
            return "noise: none"
        if claimed is None:
            return f"noise: {self.noise:.3g} times the clipping norm ({self.low:.3g} to {self.high:.3g})"
        low, high = self.low / claimed, self.high / claimed
        return f"noise: {self.noise / claimed:.3g} of the claimed level ({low:.3g} to {high:.3g})"

    @property
    def canary_line(self) -> str:
        """The signal of a canary in the scores."""
        spread = "" if self.spread_signal is None else f" (spread canaries: {self.spread_signal:.3g})"
        return f"canary: {self.signal:.3g} times the clipping norm{spread}; at most 1 if clipped correctly"

    def known(self, claimed: float | None) -> dict[str, Any]:
        """Return keyword arguments for ``likely_causes``. Too much noise causes no leak."""
        found: dict[str, Any] = {
            "signal": self.signal,
            "spread_signal": self.spread_signal,
            "is_crowded": self.is_crowded,
        }
        if self.facts is not None:
            found["canary_scale"] = self.facts.canary_scale
            found["batch_size"], found["max_grad_norm"] = self.facts.batch_size, self.facts.max_grad_norm
        if self.noise == 0:
            found["noise_ratio"] = 0.0
        elif claimed is not None:
            found["noise_multiplier"] = claimed
            if self.high < claimed:
                found["noise_ratio"] = self.noise / claimed
                found["interval"] = self.low / claimed, self.high / claimed
        return found


def _signals(
    scores: FloatArray, present: BoolArray, facts: TrainingInfo | None
) -> tuple[float, float | None]:
    """Return the mean score excess of present canaries: those on one coordinate, and spread ones."""
    count = scores.shape[1]
    narrow = facts.canary.num_narrow(count) if facts and isinstance(facts.canary, Mixed) else 0
    if narrow == 0:
        return _signal(scores, present), None
    return _signal(scores[:, :narrow], present[:, :narrow]), _signal(scores[:, narrow:], present[:, narrow:])


def _signal(scores: FloatArray, present: BoolArray) -> float:
    if present.all() or not present.any():
        return math.nan
    return float(scores[present].mean() - scores[~present].mean())


def _is_crowded(scores: FloatArray, present: BoolArray) -> bool:
    """Return whether the signal depends on the number of present canaries, as if clipped together."""
    numbers = present.sum(axis=1)
    some = (numbers > 0) & (numbers < present.shape[1])
    if np.count_nonzero(some) < _MIN_STEPS or np.ptp(numbers[some]) == 0:
        return False
    counts = numbers[some].astype(np.float64)
    means = np.where(present, scores, 0.0).sum(axis=1)[some] / counts
    found = stats.linregress(counts, means)
    change = abs(found.slope) * counts.mean()
    return bool(abs(found.slope) > _CERTAIN * found.stderr and change > _CROWDED * abs(means.mean()))


def claimed_noise(result: Result) -> float | None:
    """Return the claimed noise multiplier, if the claim states Gaussian noise."""
    hypothesis = result.hypothesis
    is_known = isinstance(hypothesis.tradeoff, Gaussian | SubsampledGaussian) and hypothesis.parameter > 0
    return 1 / hypothesis.parameter if is_known else None

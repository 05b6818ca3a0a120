"""What a developer reads when an audit fails the test.

Noise and signal as the scores of a run show them.
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
from dpaudit.diagnostics._causes import IN_PARTS
from dpaudit.pytest_plugin._session import Audits, Share
from dpaudit.recording import Recorder, TrainingInfo
from dpaudit.stats import Gaussian, Result, Verdict

_LEVELS = 0.9995, 0.0005  # of the interval of the noise: a guess that is just outside of it is none
_FEW = 30  # steps, from which on it may be said that the signal depends on how many are present
_SURELY = 6.0  # standard errors
_CROWDED = 0.2  # of its size: how much a signal changes at least if the number present is doubled


@dataclass(frozen=True, kw_only=True)
class Seen:
    """In clipping norms. Estimates, no part of the proof."""

    noise: float
    low: float  # of the noise
    high: float
    signal: float
    spread_signal: float | None
    is_crowded: bool
    facts: TrainingInfo | None

    @classmethod
    def of(cls, recorder: Recorder) -> Seen:
        """From all scores of a run."""
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
        """How far the noise is off."""
        if self.noise == 0:
            return "noise: none at all"
        if claimed is None:
            return f"noise: {self.noise:.3g} clipping norms ({self.low:.3g} to {self.high:.3g})"
        low, high = self.low / claimed, self.high / claimed
        return f"noise: {self.noise / claimed:.3g} of the claimed ({low:.3g} to {high:.3g})"

    @property
    def canary_line(self) -> str:
        """What arrives of a canary."""
        spread = "" if self.spread_signal is None else f" ({self.spread_signal:.3g} if it is spread)"
        return f"canary: arrives with {self.signal:.3g} clipping norms{spread}; a clipped one has at most 1"

    def known(self, claimed: float | None) -> dict[str, Any]:
        """Keywords of ``likely_causes``. Too much noise is the cause of no leak."""
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
    """How much more present canaries score: those on one coordinate, and those that are spread."""
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
    """Whether the signal surely depends on how many canaries are present, as where they share a clip."""
    numbers = present.sum(axis=1)
    some = (numbers > 0) & (numbers < present.shape[1])
    if np.count_nonzero(some) < _FEW or np.ptp(numbers[some]) == 0:
        return False
    counts = numbers[some].astype(np.float64)
    means = np.where(present, scores, 0.0).sum(axis=1)[some] / counts
    found = stats.linregress(counts, means)
    change = abs(found.slope) * counts.mean()
    return bool(abs(found.slope) > _SURELY * found.stderr and change > _CROWDED * abs(means.mean()))


def claimed_noise(result: Result) -> float | None:
    """The noise multiplier that is claimed, if the claim is of Gaussian noise."""
    hypothesis = result.hypothesis
    is_known = isinstance(hypothesis.tradeoff, Gaussian | SubsampledGaussian) and hypothesis.parameter > 0
    return 1 / hypothesis.parameter if is_known else None


@dataclass(frozen=True)
class Frame:
    """What every message says: which call it was, how the error is shared, and how to see it again."""

    audits: Audits
    share: Share
    own_confidence: float | None = None

    @property
    def error(self) -> float:
        """The probability of a false alarm that this call may use."""
        of_all = self.audits.confidence if self.own_confidence is None else self.own_confidence
        return self.share.of_error * (1 - of_all)

    def failure(
        self, result: Result, diagnosis: Diagnosis | None, seen: Seen | None, remarks: Sequence[str] = ()
    ) -> str:
        """Claim, bound, how far the noise is off, findings, and what may be the cause."""
        claimed = claimed_noise(result)
        lines = [f"claim: {result.claim.summary}", f"bound: {result.bound.statement}", self._shared, *remarks]
        if seen is not None:
            lines += [seen.noise_line(claimed), seen.canary_line]
        lines += _found(diagnosis)
        known = {} if seen is None else seen.known(claimed)
        lines += _causes(_guesses(diagnosis, known))
        return self._text(_title(result, diagnosis), lines)

    def no_verdict(self, why: str, gap: float | None, facts: TrainingInfo | None) -> str:
        """An audit that cannot be judged, with what may be the cause of that."""
        causes: tuple[str, ...] = ()
        if gap is not None and facts is not None:
            scale, batch_size = facts.canary_scale, facts.batch_size
            causes = likely_causes(signal=gap, canary_scale=scale, batch_size=batch_size)
        return self._text("there is no verdict.", [f"why: {why}", *_causes(causes)])

    def of_tests(self, diagnosis: Diagnosis) -> str:
        """Findings of tests that somebody else fed."""
        lines = [self._shared, *_found(diagnosis), *_causes(_guesses(diagnosis, {}))]
        return self._text("the training is not what it claims.", lines)

    def _text(self, title: str, lines: Sequence[str]) -> str:
        call = "" if self.share.number == 1 else f" (call {self.share.number} of the test)"
        return "\n".join([f"dpaudit{call}: {title}", *(f"  {line}" for line in [*lines, *self._again])])

    @property
    def _shared(self) -> str:
        count = self.audits.num_tests
        tests = "1 test" if count == 1 else f"{count} tests"
        return f"session: {100 * self.audits.confidence:g} % confidence, shared between {tests} with audits"

    @property
    def _again(self) -> list[str]:
        lines = [f"again: {self.share.again}"]
        if self.own_confidence is not None and self.audits.num_tests > 1:
            lines.append("(alone, a call with confidence= of its own shares that with no other test)")
        return lines


def _title(result: Result, diagnosis: Diagnosis | None) -> str:
    if result.verdict is Verdict.VIOLATION:
        return (
            f"epsilon >= {result.bound.epsilon:.3g}, and {result.claim.epsilon:.3g} is claimed. "
            f"{result.sentence}"
        )
    first = diagnosis.findings[0].name if diagnosis is not None else ""
    return f"{first}: the noise is not what the claim says."


def _found(diagnosis: Diagnosis | None) -> list[str]:
    return [] if diagnosis is None else [f"found: {finding}" for finding in diagnosis.findings]


def _causes(texts: Sequence[str]) -> list[str]:
    return [f"cause? {text}" for text in texts]


def _guesses(diagnosis: Diagnosis | None, known: dict[str, Any]) -> tuple[str, ...]:
    """By the scores, and by the most certain finding: the others often follow from it.

    How much noise there is in all says nothing more if it is known where it is missing.
    """
    names = [] if diagnosis is None else [finding.name for finding in diagnosis.findings]
    if IN_PARTS.intersection(names):
        names = [name for name in names if name != "noise-variance"]
        known = {name: value for name, value in known.items() if name != "noise_ratio"}
    elif diagnosis is not None and diagnosis.noise is not None and "noise-variance" in names:
        amount = diagnosis.noise  # of all coordinates, where scores are of some
        known = {**known, "noise_ratio": amount.ratio, "interval": (amount.low, amount.high)}
    return likely_causes(**known, findings=names[:1])

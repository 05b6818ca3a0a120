"""What a developer reads when an audit fails the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpaudit.accounting import SubsampledGaussian
from dpaudit.diagnostics import Diagnosis, likely_causes
from dpaudit.diagnostics._causes import IN_PARTS
from dpaudit.observers._facts import Facts
from dpaudit.pytest_plugin._seen import Seen
from dpaudit.pytest_plugin._session import Audits, Share
from dpaudit.stats import Gaussian, Result, Verdict

__all__ = ["Frame", "claimed_noise"]


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

    def no_verdict(self, why: str, gap: float | None, facts: Facts | None) -> str:
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

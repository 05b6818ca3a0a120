"""From what was seen to a verdict, with one error rate for bound and tests together.

Every method on the same scores: what each finds, and with how few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpaudit.diagnostics import Diagnosis
from dpaudit.methods import Row, examine
from dpaudit.stats import Fixed, Gaussian, Result, SameData, Verdict, audit
from dpaudit.stats._bound import plain
from dpaudit.zoo._entry import Evidence, Scores, looks


@dataclass(frozen=True)
class Compared:
    """One method: its epsilon of all steps, whether that is more than claimed, and the steps it needs."""

    name: str
    rule: str
    epsilon: float
    kind: str
    is_violation: bool
    steps_needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "epsilon": plain(self.epsilon)}


def side_by_side(evidence: Evidence, scores: Scores, confidence: float) -> tuple[Compared, ...]:
    """All methods with a rule that does not choose its threshold on the counted scores."""
    found = _at(evidence, scores, evidence.num_steps, confidence)
    open_ones = {name for name, one in found.items() if one.is_violation}
    for num_steps in reversed(looks(evidence.num_steps)):
        if not open_ones or not scores.is_enough(num_steps):
            break
        now = _at(evidence, scores, num_steps, confidence) if num_steps < evidence.num_steps else found
        open_ones = {name for name in open_ones if name in now and now[name].is_violation}
        found |= {name: replace(found[name], steps_needed=num_steps) for name in open_ones}
        if not scores.is_stepped:
            break
    return tuple(found.values())


def _at(evidence: Evidence, scores: Scores, num_steps: int, confidence: float) -> dict[str, Compared]:
    """By name; of several rules the last, which is the one that a verdict by this method would use."""
    claim, threshold = evidence.claim, None if scores.is_stepped else scores.threshold
    examined = examine(
        scores.first(num_steps),
        delta=claim.delta,
        confidence=confidence,
        tradeoff=scores.tradeoff or Gaussian(),
        threshold=threshold.threshold if isinstance(threshold, Fixed) else None,
    )
    sound = [row for row in examined.rows if not isinstance(row.method.rule, SameData)]
    return {row.method.name.split()[0]: _compared(row, claim.epsilon) for row in sound}


def _compared(row: Row, claimed: float) -> Compared:
    bound = row.bound
    return Compared(
        name=row.method.name.split()[0],
        rule=repr(row.method.rule),
        epsilon=bound.epsilon,
        kind=str(bound.kind),
        is_violation=bound.epsilon > claimed,
    )


_TESTS = 0.2  # of the error, for the tests of noise and batches; the bound has the rest


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What bound, tests and replay say of one run; a correct one is flagged by chance in 5 % at most.

    ``bound_steps`` and ``tests_steps`` are how few steps would have been enough, None if none were.
    """

    evidence: Evidence
    result: Result | None
    diagnosis: Diagnosis | None
    bound_steps: int | None = None
    tests_steps: int | None = None
    methods: tuple[Compared, ...] = ()

    @property
    def caught_by(self) -> tuple[str, ...]:
        """Everything that flags the run, by name."""
        found = ["bound"] if self.result is not None and self.result.verdict is Verdict.VIOLATION else []
        found += [] if self.diagnosis is None else [finding.name for finding in self.diagnosis.findings]
        replay = self.evidence.replay
        return (*found, "replay") if replay is not None and replay.is_violation else tuple(found)

    @property
    def steps_needed(self) -> int | None:
        """The fewest steps with which anything flags the run; a replay is one."""
        if "replay" in self.caught_by:
            return 1
        return min((n for n in (self.bound_steps, self.tests_steps) if n is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        claim, replay = self.evidence.claim, self.evidence.replay
        return {
            "claim": claim.summary,
            "claimed_epsilon": plain(claim.epsilon),
            "delta": claim.delta,
            "num_steps": self.evidence.num_steps,
            "caught_by": list(self.caught_by),
            "steps_needed": self.steps_needed,
            "bound": None if self.result is None else self._bound(self.result),
            "tests": None if self.diagnosis is None else self._tests(self.diagnosis),
            "replay": None if replay is None else dict(vars(replay)),
            "methods": [method.to_dict() for method in self.methods],
        }

    def _bound(self, result: Result) -> dict[str, Any]:
        return {
            "verdict": result.verdict.name,
            "epsilon": plain(result.bound.epsilon),
            "statement": result.bound.statement,
            "confidence": result.bound.confidence,
            "steps_needed": self.bound_steps,
        }

    def _tests(self, diagnosis: Diagnosis) -> dict[str, Any]:
        return {
            "confidence": diagnosis.confidence,
            "findings": [
                {"name": finding.name, "p_value": finding.p_value, "sentence": finding.sentence}
                for finding in diagnosis.findings
            ],
            "steps_needed": self.tests_steps,
        }


def judge(evidence: Evidence, *, confidence: float = 0.95, in_depth: bool = False) -> Judged:
    """Bound and tests at a confidence for both together; a replay has no error.

    ``in_depth``, every method is held against the claim as well, and it is asked how few steps would do.
    """
    error = 1 - confidence
    scores, tests = evidence.scores, evidence.diagnostics
    bound_level = 1 - error * (1 - _TESTS if tests else 1.0)
    tests_level = 1 - error * (_TESTS if scores else 1.0)
    result = _audited(evidence, scores, evidence.num_steps, bound_level) if scores else None
    diagnosis = tests[max(tests)].diagnose(tests_level) if tests else None
    if not in_depth:
        return Judged(evidence=evidence, result=result, diagnosis=diagnosis)
    return Judged(
        evidence=evidence,
        result=result,
        diagnosis=diagnosis,
        bound_steps=_steps_of_bound(evidence, scores, bound_level) if scores else None,
        tests_steps=_steps_of_tests({n: record.diagnose(tests_level) for n, record in tests.items()}),
        methods=side_by_side(evidence, scores, confidence) if scores else (),
    )


def _audited(evidence: Evidence, scores: Scores, num_steps: int, confidence: float) -> Result:
    return audit(
        scores.first(num_steps),
        claim=evidence.claim,
        confidence=confidence,
        tradeoff=scores.tradeoff,
        inference=scores.method(num_steps),
        threshold=scores.threshold,
    )


def _steps_of_bound(evidence: Evidence, scores: Scores, confidence: float) -> int | None:
    needed = None
    for num_steps in _downwards(evidence, scores):
        if _audited(evidence, scores, num_steps, confidence).verdict is not Verdict.VIOLATION:
            break
        needed = num_steps
    return needed


def _downwards(evidence: Evidence, scores: Scores) -> list[int]:
    if not scores.is_stepped:
        return [evidence.num_steps]
    return [look for look in reversed(looks(evidence.num_steps)) if scores.is_enough(look)]


def _steps_of_tests(diagnoses: Mapping[int, Diagnosis]) -> int | None:
    needed = None
    for num_steps in sorted(diagnoses, reverse=True):
        if not diagnoses[num_steps].findings:
            break
        needed = num_steps
    return needed

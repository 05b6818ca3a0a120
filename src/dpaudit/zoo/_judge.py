"""From the evidence of one run to a verdict, with one error rate for bound and tests together.

In depth, every method is compared with the claim as well, and the fewest sufficient steps are found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from dpaudit.diagnostics import Diagnosis
from dpaudit.diagnostics._diagnosis import flagged_by, share_error
from dpaudit.methods import examine
from dpaudit.stats import Fixed, Gaussian, Result, SameData, Verdict, audit
from dpaudit.stats._bound import plain
from dpaudit.zoo._entry import Evidence, Scores, checkpoints


def judge(evidence: Evidence, *, confidence: float = 0.95, in_depth: bool = False) -> Judged:
    """Judge by bound and tests, at one confidence for both; a replay has no error.

    ``in_depth`` compares every method with the claim as well, and finds the fewest sufficient steps.
    """
    scores, tests = evidence.scores, evidence.diagnostics
    bound_level, tests_level = share_error(
        1 - confidence, has_bound=scores is not None, has_tests=bool(tests)
    )
    judged = Judged(
        evidence=evidence,
        result=_audited(evidence, scores, evidence.num_steps, bound_level) if scores else None,
        diagnosis=tests[max(tests)].diagnose(tests_level) if tests else None,
    )
    if not in_depth:
        return judged
    with_findings = takewhile(
        lambda count: tests[count].diagnose(tests_level).findings, sorted(tests, reverse=True)
    )
    return replace(
        judged,
        bound_steps=_steps_of_bound(evidence, scores, bound_level) if scores else None,
        tests_steps=min(with_findings, default=None),
        methods=_compare_methods(evidence, scores, confidence) if scores else (),
    )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The results of bound, tests and replay for one run; at most 5 % of correct runs are flagged.

    ``bound_steps`` and ``tests_steps`` are the fewest steps that are enough, None if none are.
    """

    evidence: Evidence
    result: Result | None
    diagnosis: Diagnosis | None
    bound_steps: int | None = None
    tests_steps: int | None = None
    methods: tuple[MethodOutcome, ...] = ()

    @property
    def caught_by(self) -> tuple[str, ...]:
        """Everything that flags the run, by name."""
        replay = self.evidence.replay
        found = flagged_by(self.result, self.diagnosis)
        return (*found, "replay") if replay is not None and replay.is_violation else found

    @property
    def steps_needed(self) -> int | None:
        """The fewest steps with which anything flags the run; a replay is one."""
        if "replay" in self.caught_by:
            return 1
        return min((n for n in (self.bound_steps, self.tests_steps) if n is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
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


@dataclass(frozen=True)
class MethodOutcome:
    """One method: its epsilon of all steps, whether that is more than claimed, and the steps it needs."""

    name: str
    rule: str
    epsilon: float
    kind: str
    is_violation: bool
    steps_needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "epsilon": plain(self.epsilon)}


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
    """Return the fewest steps with a violation such that all larger numbers have one, too."""

    def is_violation(num_steps: int) -> bool:
        return _audited(evidence, scores, num_steps, confidence).verdict is Verdict.VIOLATION

    counts = [evidence.num_steps]
    if scores.is_stepped:
        counts = [count for count in reversed(checkpoints(evidence.num_steps)) if scores.is_enough(count)]
    return min(takewhile(is_violation, counts), default=None)


def _compare_methods(evidence: Evidence, scores: Scores, confidence: float) -> tuple[MethodOutcome, ...]:
    """Run all methods with a rule that does not choose its threshold on the counted scores."""
    found = _outcomes(evidence, scores, evidence.num_steps, confidence)
    violating = {name for name, outcome in found.items() if outcome.is_violation}
    for num_steps in reversed(checkpoints(evidence.num_steps)):
        if not violating or not scores.is_enough(num_steps):
            break
        is_all = num_steps == evidence.num_steps
        now = found if is_all else _outcomes(evidence, scores, num_steps, confidence)
        violating = {name for name in violating if name in now and now[name].is_violation}
        found |= {name: replace(found[name], steps_needed=num_steps) for name in violating}
        if not scores.is_stepped:
            break
    return tuple(found.values())


def _outcomes(
    evidence: Evidence, scores: Scores, num_steps: int, confidence: float
) -> dict[str, MethodOutcome]:
    """Return the outcomes by name; of several rules the last, which a verdict would use."""
    claim, threshold = evidence.claim, None if scores.is_stepped else scores.threshold
    examined = examine(
        scores.first(num_steps),
        delta=claim.delta,
        confidence=confidence,
        tradeoff=scores.tradeoff or Gaussian(),
        threshold=threshold.threshold if isinstance(threshold, Fixed) else None,
    )
    outcomes = [
        MethodOutcome(
            name=row.method.name.split()[0],
            rule=repr(row.method.rule),
            epsilon=row.bound.epsilon,
            kind=str(row.bound.kind),
            is_violation=row.bound.epsilon > claim.epsilon,
        )
        for row in examined.rows
        if not isinstance(row.method.rule, SameData)
    ]
    return {outcome.name: outcome for outcome in outcomes}

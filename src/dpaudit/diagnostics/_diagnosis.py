"""All tests of one training run with a joint error rate, which a bound on the same run may share.

``Diagnostics`` collects data during training. Its ``diagnose()`` returns a ``Diagnosis``: the tests that
were run, and the findings that remain after Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import ArrayLike, FloatArray
from dpaudit.diagnostics._causes import NO_NOISE, likely_causes
from dpaudit.diagnostics._p_values import SMALLEST_P_VALUE, Amount, Check, CheckResults, Finding
from dpaudit.diagnostics._registry import in_group, kind_of
from dpaudit.errors import FindingError

_SHARE_OF_TESTS = 0.2  # share of the error rate for the tests; the rest is for the bound
_MOST_CAUSES = 4  # more of them do not help
_SHARED = 16.0  # squared sums over a leaf are never this many times too large because of repeated noise
_SCATTER = 1.5  # by accident, the least noise of a coordinate is below that of its leaf, but not by more


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All tests that were run, and their findings.

    A correct training run, with independent normal noise and Poisson sampling as claimed, has any finding
    with probability at most 1 - confidence. A finding concerns the code, not epsilon: the accounting does not
    describe the mechanism that ran. ``notes`` list unusual results that are not leaks.
    """

    confidence: float
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    noise: Amount | None = None
    """The amount of noise; None if no noise was observed."""
    not_covered: tuple[str, ...] = ()
    """Sentences that name what could not be checked, and why."""
    assumptions: tuple[str, ...] = ()
    """What the tests rest on besides the claim, and cannot check."""

    @classmethod
    def of(
        cls,
        checks: Sequence[Check],
        *,
        confidence: float,
        certain: Sequence[Finding] = (),
        notes: Sequence[str] = (),
        noise: Amount | None = None,
        not_covered: Sequence[str] = (),
        assumptions: Sequence[str] = (),
    ) -> Diagnosis:
        """Return the diagnosis of these tests, with Holm's correction, and of findings that need no test."""
        adjusted = holm([check.p_value for check in checks])
        findings = [
            Finding(adjusted=float(level), **vars(check))
            for check, level in zip(checks, adjusted, strict=True)
            if level <= 1 - confidence
        ]
        return cls(
            confidence=confidence,
            checks=tuple(checks),
            findings=(*certain, *sorted(findings, key=_by_certainty)),
            notes=tuple(notes),
            noise=noise,
            not_covered=tuple(not_covered),
            assumptions=tuple(assumptions),
        )

    def joined(self, *others: CheckResults) -> Diagnosis:
        """Return the diagnosis with more checks of the same run, at the same joint confidence."""
        tested = {check.name for check in self.checks}
        certain = [finding for finding in self.findings if finding.name not in tested]

        def collect(name: str) -> list[Any]:
            return [item for results in (self, *others) for item in getattr(results, name)]

        return Diagnosis.of(
            collect("checks"),
            confidence=self.confidence,
            certain=[*certain, *(finding for other in others for finding in other.certain)],
            notes=collect("notes"),
            noise=next((other.noise for other in others if other.noise is not None), self.noise),
            not_covered=collect("not_covered"),
            assumptions=collect("assumptions"),
        )

    def likely_causes(self, **clues: Any) -> tuple[str, ...]:
        """Return likely causes of the findings; keywords are as in :func:`likely_causes`."""
        names = [finding.name for finding in self.findings]
        causes = {finding.name: finding.cause for finding in self.findings if finding.cause}
        mean = next((finding for finding in self.findings if finding.name == "coordinate-correlation"), None)
        if mean is not None and mean.p_value > SMALLEST_P_VALUE > self.findings[0].p_value:
            causes.pop(mean.name, None)  # less certain than what may have caused it
        if self.noise is not None and "noise-variance" in names and "noise-variance" not in causes:
            clues = {"noise_ratio": self.noise.ratio, "interval": (self.noise.low, self.noise.high), **clues}
        return likely_causes(findings=names, own_causes=causes, **clues)

    @property
    def tests_sampling(self) -> bool:
        """Whether any of the tests is about how batches are drawn."""
        return in_group((check.name for check in self.checks), "sampling")

    def raise_for_findings(self) -> None:
        """Raise :class:`dpaudit.FindingError` if there are findings."""
        if self.findings:
            raise FindingError(str(self))

    def __str__(self) -> str:
        lines = [findings_sentence(self), *(f"  {finding}" for finding in self.findings)]
        if len(self.findings) > 1:
            lines.append("  The first finding is the most certain; the others may follow from it.")
        lines += [f"  possible cause: {cause}" for cause in self.likely_causes()]
        lines += [f"  assumes: {text}" for text in self.assumptions]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def table(self) -> str:
        """Return a table of all tests and their p-values, one per line."""
        failed = {finding.name for finding in self.findings}
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [
            f"{check.name:<{width}}  {check.p_value:8.2g}  {'FOUND' if check.name in failed else ''}".rstrip()
            for check in self.checks
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        noise = self.noise
        return {
            "confidence": self.confidence,
            "findings": [
                {**vars(finding), "estimate": _finite(finding.estimate)} for finding in self.findings
            ],
            "tests": [
                {"name": check.name, "p_value": check.p_value, "estimate": _finite(check.estimate)}
                for check in self.checks
            ],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "assumptions": list(self.assumptions),
            "likely_causes": list(self.likely_causes()),
            "noise": None if noise is None else dict(vars(noise)),
        }


def _finite(estimate: float) -> float | None:
    """Return the estimate for JSON, which has no number for a finding without one."""
    return estimate if math.isfinite(estimate) else None


def findings_sentence(diagnosis: Diagnosis) -> str:
    """Return the numbers of findings and of tests, with their joint confidence."""
    findings, tests = len(diagnosis.findings), len(diagnosis.checks)
    count = f"{findings or 'No'} {'finding' if findings == 1 else 'findings'}"
    run = f"{tests} {'test' if tests == 1 else 'tests'}"
    return f"{count} in {run}, at {_validate.percent(diagnosis.confidence)} joint confidence."


def joint_causes(diagnosis: Diagnosis | None, clues: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a few likely causes, best first, from the findings and from ``clues`` of the scores.

    ``clues`` are keywords of :func:`likely_causes`. The total amount of noise adds nothing once it is known
    where noise is missing, and scores show the noise of some coordinates only.
    """
    if diagnosis is None:
        return likely_causes(**clues)[:_MOST_CAUSES]
    names = [finding.name for finding in diagnosis.findings]
    amount = next((finding for finding in diagnosis.findings if finding.name == "noise-variance"), None)
    is_located = in_group(names, "located")
    if is_located or (amount is not None and (amount.cause or diagnosis.noise is not None)):
        clues = {name: clue for name, clue in clues.items() if name not in ("noise_ratio", "interval")}
    if is_located:
        located = tuple(finding for finding in diagnosis.findings if finding.name != "noise-variance")
        diagnosis = replace(diagnosis, findings=located)
    return diagnosis.likely_causes(**clues)[:_MOST_CAUSES]


def share_error(error_rate: float, *, has_bound: bool, has_tests: bool) -> tuple[float, float]:
    """Return the confidence of a bound and of the tests, for a joint error rate of at most ``error_rate``.

    This is a union bound, valid under any dependence; a bound or tests alone get the entire error rate.
    """
    bound, tests = 1 - _SHARE_OF_TESTS if has_tests else 1.0, _SHARE_OF_TESTS if has_bound else 1.0
    return 1 - bound * error_rate, 1 - tests * error_rate


def holm(p_values: ArrayLike) -> FloatArray:
    """Return the smallest level at which each hypothesis would be rejected, under any dependence.

    Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> holm([0.01, 0.04, 0.03])
    array([0.03, 0.06, 0.06])
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    stepped = values[order] * np.arange(values.size, 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return adjusted


def _by_certainty(finding: Finding) -> tuple[float, float, float]:
    """Return the sort key of a finding: most certain first; among the certain, causes before consequences.

    Among parts that lack noise, those with the least noise come first.
    """
    rank, least, size = kind_of(finding.name).rank, 0.0, abs(finding.estimate)
    if finding.name in {"step-noise", "leaf-noise", "coordinate-noise"}:
        scatter = _SCATTER if finding.name == "coordinate-noise" else 1.0
        least = scatter * max(finding.estimate, NO_NOISE)
    same = 0.95  # correlation above which noise counts as repeated, not merely correlated
    is_merely_correlated = finding.name == "repeated-noise" and size < same
    weak = 0.1  # correlation below which noise of low rank is a likelier cause
    is_weak = finding.name in {"step-correlation", "shifted-noise"} and size < weak
    if is_merely_correlated or is_weak:
        rank = kind_of("low-rank-noise").rank + 0.5
    if finding.name == "coordinate-correlation" and finding.estimate > _SHARED:
        rank = -1.0
    return max(finding.p_value, SMALLEST_P_VALUE), rank, least

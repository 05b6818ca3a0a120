"""What the tests of one training say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpaudit.diagnostics._causes import likely_causes
from dpaudit.diagnostics._check import Check, Finding
from dpaudit.diagnostics._holm import holm
from dpaudit.diagnostics._order import certainty
from dpaudit.diagnostics.noise import Amount
from dpaudit.errors import FindingError

__all__ = ["Diagnosis"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All tests that were run, and those that found something.

    A training that is what it claims, independent normal noise and Poisson sampling, has any finding with
    probability 1 - confidence at most. That is a statement about the code, not about epsilon: a finding says
    that the accounting is of another mechanism. ``notes`` are what is odd, but leaks nothing.
    """

    confidence: float
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    noise: Amount | None = None
    """How much noise there is; None if none was observed."""

    @classmethod
    def of(
        cls,
        checks: Sequence[Check],
        *,
        confidence: float,
        notes: Sequence[str] = (),
        noise: Amount | None = None,
    ) -> Diagnosis:
        """The findings of these tests, by Holm's correction."""
        adjusted = holm([check.p_value for check in checks])
        findings = [
            Finding(
                name=check.name,
                p_value=check.p_value,
                adjusted=float(level),
                sentence=check.sentence,
                estimate=check.estimate,
            )
            for check, level in zip(checks, adjusted, strict=True)
            if level <= 1 - confidence
        ]
        return cls(
            confidence=confidence,
            checks=tuple(checks),
            findings=tuple(sorted(findings, key=certainty)),
            notes=tuple(notes),
            noise=noise,
        )

    def likely_causes(self, **known: Any) -> tuple[str, ...]:
        """What may be behind the findings; keywords are those of :func:`likely_causes`."""
        names = [finding.name for finding in self.findings]
        if self.noise is not None and "noise-variance" in names:
            known = {"noise_ratio": self.noise.ratio, "interval": (self.noise.low, self.noise.high), **known}
        return likely_causes(findings=names, **known)

    def raise_for_findings(self) -> None:
        """Raise :class:`dpaudit.FindingError` if there is any finding; else do nothing."""
        if self.findings:
            raise FindingError(str(self))

    def __str__(self) -> str:
        count = len(self.findings)
        found = {0: "Nothing found", 1: "1 finding"}.get(count, f"{count} findings")
        lines = [
            f"{found} by {len(self.checks)} tests, {100 * self.confidence:g} % confidence for all together."
        ]
        lines += [f"  {finding}" for finding in self.findings]
        lines += ["  The first is the most certain; the others may follow from it."] if count > 1 else []
        lines += [f"  cause? {cause}" for cause in self.likely_causes()]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def table(self) -> str:
        """Every test with its p-value, a line each."""
        found = {finding.name for finding in self.findings}
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [
            f"{check.name:<{width}}  {check.p_value:8.2g}  {'FOUND' if check.name in found else ''}".rstrip()
            for check in self.checks
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        noise = self.noise
        return {
            "confidence": self.confidence,
            "findings": [vars(finding) for finding in self.findings],
            "tests": [
                {"name": check.name, "p_value": check.p_value, "estimate": check.estimate}
                for check in self.checks
            ],
            "notes": list(self.notes),
            "likely_causes": list(self.likely_causes()),
            "noise": None if noise is None else dict(vars(noise)),
        }

"""The result of a replay: what one example can change in a training step, without statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from dpaudit.diagnostics import CheckResults, Finding, likely_causes
from dpaudit.errors import ViolationError


@dataclass(frozen=True, kw_only=True)
class NeighborCheck:
    """A replayed neighbor, and the distance by which it moved the release, in clipping norms."""

    change: str
    distance: float
    """NaN if the distance could not be compared."""
    allowed: float


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What one example can change in a training step, compared without statistics.

    A finding is certain: it names something that the step releases or writes and that depends on one example
    in a way that the noise does not hide. ``non_finite`` has findings that matter only if an example can have
    a non-finite gradient, as in every loop with Opacus 1.6; they are not violations.
    """

    checks: tuple[NeighborCheck, ...]
    findings: tuple[Finding, ...]
    non_finite: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    """Sentences that name what could not be checked, and why."""
    tests_coupling: ClassVar[bool] = True
    """Whether gradients that depend on other examples are detected; see ``dpaudit.recording``."""

    @property
    def largest(self) -> float:
        """The largest distance by which one example moved the release, as a fraction of what is allowed."""
        shares = [check.distance / check.allowed for check in self.checks if not math.isnan(check.distance)]
        return max(shares, default=math.nan)

    @property
    def is_violation(self) -> bool:
        """Whether one example changes more than the claim allows."""
        return bool(self.findings)

    def raise_for_violation(self) -> None:
        """Raise a ``ViolationError`` if one example changes more than the claim allows."""
        if self.is_violation:
            raise ViolationError(str(self))

    def likely_causes(self) -> tuple[str, ...]:
        """Return likely causes of the findings, best first."""
        return likely_causes(findings=[finding.name for finding in (*self.findings, *self.non_finite)])

    def results(self, **_: Any) -> CheckResults:
        """Return the findings as a part of a diagnosis, for the ``checks`` of a recorder."""
        notes = (*self.notes, *(finding.sentence for finding in self.non_finite))
        return CheckResults(certain=self.findings, notes=notes, not_covered=self.not_covered)

    def __str__(self) -> str:
        count = len(self.findings)
        found = f"{count or 'No'} {'finding' if count == 1 else 'findings'}"
        lines = [f"{found} in {len(self.checks)} replayed batches."]
        lines += [f"  {one.name}: {one.sentence}" for one in (*self.findings, *self.non_finite)]
        lines += [f"  possible cause: {cause}" for cause in self.likely_causes()]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""

        def plain(values: dict[str, Any]) -> dict[str, Any]:
            return {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }

        return {
            "is_violation": self.is_violation,
            "checks": [plain(vars(check)) for check in self.checks],
            "findings": [plain(vars(finding)) for finding in self.findings],
            "non_finite": [plain(vars(finding)) for finding in self.non_finite],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "likely_causes": list(self.likely_causes()),
        }

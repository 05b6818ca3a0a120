"""What tests of noise and batches found, as a report shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpaudit.report._values import Values

__all__ = ["DiagnosisValues", "FindingValues"]


@dataclass(frozen=True, kw_only=True)
class FindingValues:
    """A test that found something."""

    name: str
    p_value: float
    adjusted: float
    sentence: str


@dataclass(frozen=True, kw_only=True)
class DiagnosisValues:
    """All tests with their p-values, and what was found."""

    confidence: float
    tests: tuple[tuple[str, float], ...]
    findings: tuple[FindingValues, ...]
    causes: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, values: Values) -> DiagnosisValues:
        """From the form of :meth:`dpaudit.Diagnosis.to_dict`."""
        return cls(
            confidence=values.share("confidence"),
            tests=tuple((one.text("name"), one.share("p_value")) for one in values.sections("tests")),
            findings=tuple(_finding(one) for one in values.sections("findings")),
            causes=values.texts("likely_causes"),
            notes=values.texts("notes"),
        )

    @property
    def sentence(self) -> str:
        """How many were found."""
        count = len(self.findings)
        found = {0: "Nothing was found", 1: "1 finding"}.get(count, f"{count} findings")
        return f"{found} by {len(self.tests)} tests, {100 * self.confidence:g} % confidence for all together."

    @property
    def short(self) -> str:
        """What was found, by name."""
        names = ", ".join(one.name for one in self.findings)
        return f"found {names}" if names else "nothing found"

    @property
    def meaning(self) -> str:
        """How it stands to the verdict."""
        apart = "Their error is beside that of the bound, and the verdict does not rest on them."
        if not self.findings:
            return apart
        return f"{apart} A finding says that the training is not what was accounted for, nothing of epsilon."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "confidence": self.confidence,
            "tests": [{"name": name, "p_value": p_value} for name, p_value in self.tests],
            "findings": [dict(vars(one)) for one in self.findings],
            "likely_causes": list(self.causes),
            "notes": list(self.notes),
        }


def _finding(values: Values) -> FindingValues:
    return FindingValues(
        name=values.text("name"),
        p_value=values.share("p_value"),
        adjusted=values.real("adjusted", low=0.0),
        sentence=values.text("sentence"),
    )

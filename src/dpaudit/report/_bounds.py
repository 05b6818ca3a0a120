"""What a report says of one bound, of the claim and of the power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpaudit.errors import InputError
from dpaudit.report._values import Values
from dpaudit.stats import ErrorCounts, Kind
from dpaudit.stats._bound import plain
from dpaudit.stats._result import Power

__all__ = ["BoundValues", "ClaimValues", "read_power"]


_SUREST = 1 - 1e-12  # a confidence of 1 would need observations without end


@dataclass(frozen=True, kw_only=True)
class ClaimValues:
    """The claim in a line, and its numbers."""

    summary: str
    epsilon: float
    delta: float
    parameter: float

    @classmethod
    def read(cls, values: Values) -> ClaimValues:
        """From a result's own form."""
        return cls(
            summary=values.text("summary"),
            epsilon=values.number("epsilon"),
            delta=values.share("delta"),
            parameter=values.number("parameter"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "summary": self.summary,
            "epsilon": plain(self.epsilon),
            "delta": self.delta,
            "parameter": plain(self.parameter),
        }


@dataclass(frozen=True, kw_only=True)
class BoundValues:
    """A bound by one method. ``whole`` is its epsilon for what the claim is of; None if it has none."""

    name: str
    statement: str
    epsilon: float
    whole: float | None
    parameter: float
    delta: float
    confidence: float
    kind: Kind
    tradeoff: str
    inference: str
    rule: str
    threshold: float | None
    counts: ErrorCounts | None
    assumptions: tuple[str, ...]

    @classmethod
    def read(cls, values: Values, whole: float | None, *, name: str | None = None) -> BoundValues:
        """From a bound's own form; a method beside others has its name there."""
        return cls(
            name=values.text("name") if name is None else name,
            statement=values.text("statement"),
            epsilon=values.number("epsilon"),
            whole=whole,
            parameter=values.number("parameter"),
            delta=values.share("delta"),
            confidence=values.real("confidence", low=0.5, high=_SUREST),
            kind=_kind(values),
            tradeoff=values.text("tradeoff"),
            inference=values.text("inference"),
            rule=values.text("threshold_rule"),
            threshold=values.real("threshold") if values.has("threshold") else None,
            counts=_counts(values.section("counts")),
            assumptions=values.texts("assumptions"),
        )

    @classmethod
    def read_all(cls, values: Values, delta: float) -> tuple[BoundValues, ...]:
        """The bounds of all methods; those of steps have an epsilon for the whole training beside their own.

        A bound at delta = 0, as Katz's interval is, cannot be compared with a claim at another delta.
        """
        rows = list(values.sections("methods"))
        of_steps = any(row.has("training_epsilon") for row in rows)
        found = []
        for row in rows:
            alike = row.number("epsilon") if row.share("delta") == delta else None
            found.append(cls.read(row, row.maybe_number("training_epsilon") if of_steps else alike))
        return tuple(found)

    @property
    def method(self) -> str:
        """Trade-off, inference and threshold rule."""
        return f"{self.tradeoff} + {self.inference} + {self.rule}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "statement": self.statement,
            "epsilon": plain(self.epsilon),
            "claim_epsilon": None if self.whole is None else plain(self.whole),
            "parameter": plain(self.parameter),
            "delta": self.delta,
            "confidence": self.confidence,
            "kind": str(self.kind),
            "tradeoff": self.tradeoff,
            "inference": self.inference,
            "threshold_rule": self.rule,
            "threshold": self.threshold,
            "counts": None if self.counts is None else self.counts.to_dict(),
            "assumptions": list(self.assumptions),
        }


def read_power(values: Values) -> Power:
    """The smallest leak that would have been flagged."""
    return Power(
        probability=values.share("probability"),
        epsilon=values.number("epsilon"),
        parameter=values.number("parameter"),
        noise_factor=values.real("noise_factor", low=0.0) if values.has("noise_factor") else None,
    )


def _kind(values: Values) -> Kind:
    word = values.text("kind")
    if word not in list(Kind):
        raise InputError(
            f"Expected {values.place}.kind to be confidence, credible or heuristic in {values.source}, got "
            f"{word[:60]!a}."
        )
    return Kind(word)


def _counts(values: Values) -> ErrorCounts | None:
    """The four counts; None for guesses, which have no rates."""
    if not values.has("false_positives"):
        return None
    names = "false_positives", "num_absent", "false_negatives", "num_present"
    return ErrorCounts(**{name: values.whole(name) for name in names})

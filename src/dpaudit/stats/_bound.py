"""A lower bound with its method and assumptions, and its conversion to and from plain values."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from dpaudit import _validate
from dpaudit.errors import InputError, quoted
from dpaudit.stats._counts import ErrorCounts, Guesses
from dpaudit.stats._serialization import NamedPart
from dpaudit.stats.inference import Inference, Kind
from dpaudit.stats.thresholds import ThresholdRule
from dpaudit.stats.tradeoffs import TradeOff

LARGEST: Final = sys.float_info.max  # a range that ends here excludes infinity
_LONGEST = 10_000  # characters of an assumption; longer ones are rejected


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on the parameter of a trade-off, and the corresponding epsilon at ``delta``."""

    epsilon: float
    delta: float
    confidence: float
    parameter: float
    tradeoff: TradeOff | NamedPart
    inference: Inference | NamedPart
    threshold_rule: ThresholdRule | NamedPart
    threshold: float | None
    counts: ErrorCounts | Guesses
    kind: Kind
    assumptions: tuple[str, ...]

    @property
    def method(self) -> str:
        """The inference, as its ``repr``."""
        return repr(self.inference)

    @property
    def rule(self) -> str:
        """The threshold rule, as its ``repr``."""
        return repr(self.threshold_rule)

    @property
    def label(self) -> str:
        """Trade-off, inference and threshold rule."""
        return f"{self.tradeoff} + {self.method} + {self.rule}"

    @property
    def statement(self) -> str:
        """The bound as a sentence that states what its error rate means."""
        text = f"epsilon >= {self.epsilon:.4g} at delta = {self.delta:g}"
        if self.tradeoff.symbol != "epsilon":
            text = f"{self.tradeoff.symbol} >= {self.parameter:.4g}, {text}"
        level = _validate.percent(self.confidence)
        return {
            Kind.CONFIDENCE: f"{text}, with {level} confidence",
            Kind.CREDIBLE: f"{text}, with {level} posterior probability (not a confidence bound)",
            Kind.HEURISTIC: f"{text}: a heuristic at nominal {level}, not a confidence bound",
        }[self.kind]

    def __str__(self) -> str:
        lines = [self.statement, f"  {self.label}"]
        return "\n".join(lines + [f"  assumes: {text}" for text in self.assumptions])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, from which :meth:`from_dict` restores an equal bound."""
        return {
            "epsilon": plain(self.epsilon),
            "delta": self.delta,
            "confidence": self.confidence,
            "kind": str(self.kind),
            "statement": self.statement,
            "parameter": plain(self.parameter),
            "symbol": self.tradeoff.symbol,
            "label": self.label,
            "tradeoff": self.tradeoff.to_dict(),
            "inference": self.inference.to_dict(),
            "threshold_rule": self.threshold_rule.to_dict(),
            "threshold": self.threshold,
            "counts": self.counts.to_dict(),
            "assumptions": list(self.assumptions),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Bound:
        """Restore a bound from :meth:`to_dict`; invalid values raise ``InputError``."""
        threshold = _validate.mapping("the values of a bound", values).get("threshold")
        return cls(
            epsilon=number(values, "epsilon"),
            delta=number(values, "delta", high=1.0),
            confidence=number(values, "confidence", low=0.5, high=_validate.MOST_CONFIDENT),
            parameter=number(values, "parameter"),
            tradeoff=TradeOff.from_dict(_part(values, "tradeoff")),
            inference=Inference.from_dict(_part(values, "inference")),
            threshold_rule=ThresholdRule.from_dict(_part(values, "threshold_rule")),
            threshold=None if threshold is None else number(values, "threshold", low=-LARGEST, high=LARGEST),
            counts=_counts(values),
            kind=_kind(values),
            assumptions=_texts(values, "assumptions"),
        )


def plain(value: float) -> float | str:
    """Return the value, or "inf" for infinity, which JSON cannot represent."""
    return value if abs(value) != float("inf") else "inf"


def number(values: Mapping[str, Any], name: str, *, low: float = 0.0, high: float = math.inf) -> float:
    """Return a number that :func:`plain` wrote, or raise ``InputError``."""
    value = values.get(name)
    if value == "inf" and high == math.inf:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refused(name, f"to be a number in [{low:g}, {high:g}]", value)
    try:
        result = float(value)
    except OverflowError:  # an integer too large for a float
        result = math.inf
    if math.isinf(result):
        raise _refused(name, "to be a finite number", value)
    return result


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name)
    if not isinstance(value, Mapping):
        raise _refused(name, "to be an object with a type", value)
    return value


def _counts(values: Mapping[str, Any]) -> ErrorCounts | Guesses:
    counts = values.get("counts")
    if not isinstance(counts, Mapping):
        raise _refused("counts", "to be an object", counts)
    kind = ErrorCounts if "false_positives" in counts else Guesses
    arguments: dict[str, Any] = {
        field.name: counts[field.name] for field in fields(kind) if field.name in counts
    }
    try:
        return kind(**arguments)
    except TypeError as error:
        raise _refused("counts", f"to have the fields of {kind.__name__}", dict(counts)) from error


def _kind(values: Mapping[str, Any]) -> Kind:
    word = values.get("kind")
    if word not in list(Kind):
        raise _refused("kind", "to be confidence, credible or heuristic", word)
    return Kind(word)


def _texts(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = values.get(name)
    if not isinstance(texts, list) or not all(
        isinstance(text, str) and len(text) <= _LONGEST for text in texts
    ):
        raise _refused(name, f"to be a list of strings of at most {_LONGEST:,} characters", texts)
    return tuple(texts)


def _refused(name: str, expected: str, value: object) -> InputError:
    shown = "nothing" if value is None else quoted(value)
    return InputError(f"Expected {name} {expected}, got {shown}.")

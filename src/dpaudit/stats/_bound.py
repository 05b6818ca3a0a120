"""What an audit states: a lower bound and the power to detect a leak, in words and as plain values."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError, quoted
from dpaudit.stats._counts import ErrorCounts, Guesses
from dpaudit.stats._serialization import NamedPart
from dpaudit.stats.inference import Inference, Kind
from dpaudit.stats.thresholds import ThresholdRule
from dpaudit.stats.tradeoffs import TradeOff
from dpaudit.stats.tradeoffs._attack import MECHANISMS

if TYPE_CHECKING:
    from dpaudit.stats._result import Hypothesis

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


@dataclass(frozen=True, kw_only=True)
class Power:
    """The smallest leak that the audit would have detected with the given probability.

    ``is_ideal`` if that takes an ideal attack, which raw scores need not come from. Then ``efficiency`` is
    the signal of the actual attack relative to an ideal one, if the power is that of an attack with it.
    """

    probability: float
    epsilon: float
    parameter: float
    # noise of the leak relative to the claimed noise; None if the parameter is not an inverse noise
    noise_factor: float | None
    # mean length of canaries after clipping, in clipping norms; None if it is 1 or not known
    canary_length: float | None = None
    # the mechanism that has this epsilon; None if it follows from the curve
    mechanism: str | None = None
    is_ideal: bool = False
    efficiency: float | None = None

    @classmethod
    def of(
        cls,
        parameter: float,
        hypothesis: Hypothesis,
        probability: float,
        lengths: tuple[float, ...] = (1.0,),
        *,
        is_ideal: bool = False,
        efficiency: float | None = None,
    ) -> Power:
        """Return the leak of a mechanism with the given parameter, detected by canaries of these lengths."""
        scales = hypothesis.tradeoff.is_inverse_noise
        length = float(np.mean(lengths))
        return cls(
            probability=probability,
            epsilon=hypothesis.epsilon(parameter),
            parameter=parameter,
            noise_factor=hypothesis.parameter / parameter if scales else None,
            canary_length=length if length < 0.995 else None,
            mechanism=hypothesis.tradeoff.attacked_mechanism,
            is_ideal=is_ideal,
            efficiency=efficiency,
        )

    def __str__(self) -> str:
        detected = f"would have been detected with {_validate.percent(self.probability)} probability"
        text = f"no leak {detected}" if math.isinf(self.parameter) else f"{self._leak} {detected}"
        if self.efficiency is not None:
            return (
                f"shows {self.efficiency:.2g} of an ideal attack's signal, if the noise is as claimed; with "
                f"that share of it, {text} (an estimate from its own scores)"
            )
        if self.is_ideal:
            return f"{text} by an ideal attack with this many scores"
        if not math.isinf(self.parameter):
            text += " by an attack of this design"
        if self.canary_length is not None:
            text += f" (canaries reach {self.canary_length:.2g} of the clipping norm)"
        return text

    @property
    def _leak(self) -> str:
        text = f"a true epsilon of {self.epsilon:.4g}"
        if self.mechanism is not None:
            text = f"{self.mechanism} with {text}"
        if self.noise_factor is not None:
            text += f" (noise at {self.noise_factor:.4g} of the claimed level)"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        optional = {
            "canary_length": self.canary_length,
            "mechanism": self.mechanism,
            "is_ideal": self.is_ideal or None,
            "efficiency": self.efficiency,
        }
        return {
            "probability": self.probability,
            "epsilon": plain(self.epsilon),
            "parameter": plain(self.parameter),
            "noise_factor": self.noise_factor,
            **{name: value for name, value in optional.items() if value is not None},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Power:
        """Restore a power from :meth:`to_dict`; invalid values raise ``InputError``."""
        _validate.mapping("the values of a power", values)

        def optional(name: str, high: float) -> float | None:
            return None if values.get(name) is None else number(values, name, high=high)

        mechanism = values.get("mechanism")
        return cls(
            probability=number(values, "probability", high=1.0),
            epsilon=number(values, "epsilon"),
            parameter=number(values, "parameter"),
            noise_factor=optional("noise_factor", LARGEST),
            canary_length=optional("canary_length", 1.0),
            mechanism=mechanism if mechanism in MECHANISMS else None,
            is_ideal=values.get("is_ideal") is True,
            efficiency=optional("efficiency", 1.0),
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

"""What an audit states: a lower bound and the power to detect a leak, in words and as plain values."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_CEILING
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError, quoted
from dpaudit.stats._counts import ErrorCounts, Guesses
from dpaudit.stats._serialization import NamedPart
from dpaudit.stats.inference import Inference, Kind
from dpaudit.stats.thresholds import ThresholdRule
from dpaudit.stats.tradeoffs import MECHANISMS, TradeOff

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
        with restoring("a bound", values):
            counts = entry(values, "counts", Mapping)
            return cls(
                epsilon=number(values, "epsilon"),
                delta=number(values, "delta", high=1.0),
                confidence=number(values, "confidence", low=0.5, high=_validate.MOST_CONFIDENT),
                parameter=number(values, "parameter"),
                tradeoff=TradeOff.from_dict(entry(values, "tradeoff", Mapping)),
                inference=Inference.from_dict(entry(values, "inference", Mapping)),
                threshold_rule=ThresholdRule.from_dict(entry(values, "threshold_rule", Mapping)),
                threshold=optional_number(values, "threshold", low=-LARGEST, high=LARGEST),
                counts=ErrorCounts(**counts) if "false_positives" in counts else Guesses(**counts),
                kind=Kind(values["kind"]),
                assumptions=tuple(map(text, entry(values, "assumptions", list))),
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
        short = self.canary_length
        length = "" if short is None else f"; canaries reach {short:.2g} of the clipping norm"
        return f"{self.sentence()}{length}"

    def sentence(self, verb: str = "detects") -> str:
        """Return which leaks are detected; of too weak an audit, the verb is "would detect only".

        >>> print(Power(probability=0.8, epsilon=6.037, parameter=1.02, noise_factor=0.981))
        detects noise below 98 % of the claim (epsilon 6.04), 80 % of the time
        """
        attack = "an ideal attack " if self.is_ideal else ""
        if self.efficiency is not None:
            attack = f"this attack, with about {100 * self.efficiency:.0f} % of the ideal signal, "
        if math.isinf(self.parameter):
            return f"{attack}{verb.removesuffix(' only')} no leak, however large"
        return f"{attack}{verb} {self._leak}, {_validate.percent(self.probability)} of the time"

    @property
    def _leak(self) -> str:
        epsilon, factor = _validate.rounded(self.epsilon, ROUND_CEILING), self.noise_factor
        if factor is not None:
            share = _validate.rounded_down(100 * factor, 0 if factor >= 0.01 else 4)
            leak = f" (epsilon {epsilon})" if math.isfinite(self.epsilon) else ""
            return f"noise below {share} % of the claim{leak}"
        if not math.isfinite(self.epsilon):
            return f"a parameter above {_validate.rounded(self.parameter, ROUND_CEILING)}"
        mechanism = "" if self.mechanism is None else f"{self.mechanism} of "
        return f"{mechanism}epsilon above {epsilon}"

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
        with restoring("a power", values):
            mechanism = values.get("mechanism")
            return cls(
                probability=number(values, "probability", high=1.0),
                epsilon=number(values, "epsilon"),
                parameter=number(values, "parameter"),
                noise_factor=optional_number(values, "noise_factor", high=LARGEST),
                canary_length=optional_number(values, "canary_length", high=1.0),
                mechanism=mechanism if mechanism in MECHANISMS else None,
                is_ideal=values.get("is_ideal") is True,
                efficiency=optional_number(values, "efficiency", high=1.0),
            )


@contextmanager
def restoring(name: str, values: object) -> Iterator[None]:
    """Turn what damaged values raise into an ``InputError``."""
    _validate.mapping(f"the values of {name}", values)
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = f"{type(error).__name__}: {quoted(str(error))}"
        raise InputError(f"The values of {name} are damaged ({reason}).") from error


def plain(value: float) -> float | str:
    """Return the value, or "inf" for infinity, which JSON cannot represent."""
    return value if abs(value) != float("inf") else "inf"


def number(values: Mapping[str, Any], name: str, *, low: float = 0.0, high: float = math.inf) -> float:
    """Return a finite number, or an infinite one that :func:`plain` wrote; otherwise raise ``InputError``."""
    value = values.get(name)
    if value == "inf" and high == math.inf:
        return math.inf
    most = min(high, LARGEST)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= most:
        shown = "nothing" if value is None else quoted(value)
        raise InputError(f"{name} must be a number between {low:g} and {high:g}, got {shown}.")
    return float(value)


def optional_number(values: Mapping[str, Any], name: str, **limits: float) -> float | None:
    """Return a number that :func:`plain` wrote, None if there is none, or raise ``InputError``."""
    return None if values.get(name) is None else number(values, name, **limits)


def entry(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a value of this type, or raise ``InputError``."""
    if not isinstance(values.get(name), kind):
        raise InputError(f"{name} must be a {kind.__name__}, got {quoted(values.get(name))}.")
    return values[name]


def text(value: object) -> str:
    """Return a string that is not too long, or raise ``TypeError``."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise TypeError(f"expected strings of at most {_LONGEST:,} characters")
    return value


GIVEN, READ, DEFAULT = "given", "read", "default"


@dataclass(frozen=True, kw_only=True)
class ClaimPart:
    """A number of a claim and its source: given by the user, read from the audited code, or a default.

    ``origin`` says where it was read or what the default is, such as "the optimizer". A number that was read
    is believed: if the code is wrong about it, so is the claim.
    """

    name: str
    value: float
    source: str = GIVEN
    origin: str = ""

    def __str__(self) -> str:
        source = {READ: f"read from {self.origin}", DEFAULT: f"by default {self.origin}"}
        return f"{self.name}={self.value:g} ({source.get(self.source, GIVEN)})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClaimPart:
        """Restore a part from :meth:`to_dict`; invalid values raise ``InputError``."""
        with restoring("a part of the claim", values):
            if values["source"] not in (GIVEN, READ, DEFAULT):
                raise ValueError(f"a source other than {GIVEN}, {READ} or {DEFAULT}")
            texts = {key: text(values[key]) for key in ("name", "source", "origin")}
            return cls(value=number(values, "value", high=LARGEST), **texts)

"""Plain values that somebody else wrote: each is checked where it is taken.

Words of anybody, made fit to be shown. Nested settings as lines with a label each. What a report says of one
bound, of the claim and of the power. What tests of noise and batches found, as a report shows it.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dpaudit.errors import InputError
from dpaudit.stats import ErrorCounts, Inference, Kind, ThresholdRule, TradeOff
from dpaudit.stats._bound import plain
from dpaudit.stats._result import Power

_KEPT = "\n\t"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def fit(text: str) -> str:
    """Without what moves a terminal's cursor, turns the direction of letters, or is no letter at all.

    >>> fit("a" + chr(27) + "[2J") == "a" + chr(0xFFFD) + "[2J"
    True
    """
    return "".join(one if one in _KEPT or _is_shown(one) else _REPLACEMENT for one in text)


def _is_shown(one: str) -> bool:
    # control characters, those of format such as a change of direction, and halves of a pair
    return unicodedata.category(one) not in ("Cc", "Cf", "Cs")


_LONGEST_VALUES = 10_000  # characters of a text that is shown


@dataclass(frozen=True)
class Values:
    """A mapping from a file, and the words by which an error names it."""

    raw: Mapping[str, Any]
    source: str
    place: str = ""

    def has(self, key: str) -> bool:
        """Whether there is something under this key."""
        return self.raw.get(key) is not None

    def text(self, key: str) -> str:
        """A text that is not too long to be shown."""
        value = self.raw.get(key)
        if not isinstance(value, str) or len(value) > _LONGEST_VALUES:
            raise self._refused(key, f"to be a text of at most {_LONGEST_VALUES:,} characters", value)
        return fit(value)

    def part(self, key: str, kind: type[TradeOff | Inference | ThresholdRule]) -> str:
        """A part of a method, as it was called."""
        return fit(repr(kind.from_dict(self.section(key).raw)))

    def number(self, key: str) -> float:
        """A number, not negative; JSON has no infinity, and has a word for it."""
        return math.inf if self.raw.get(key) == "inf" else self.real(key, low=0.0)

    def share(self, key: str) -> float:
        """A number from 0 to 1."""
        return self.real(key, low=0.0, high=1.0)

    def real(self, key: str, *, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number in a range."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self._refused(key, "to be a number", value)
        if not low <= value <= high:
            raise self._refused(key, f"in [{low:g}, {high:g}]", value)
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """A number or nothing."""
        return self.number(key) if self.has(key) else None

    def whole(self, key: str) -> int:
        """A whole number, not negative."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise self._refused(key, "to be a whole number", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; no list is an empty one."""
        items = self._items(key)
        numbered = Values({str(i): item for i, item in enumerate(items)}, self.source, self._named(key))
        return tuple(numbered.text(str(i)) for i in range(len(items)))

    def section(self, key: str) -> Values:
        """The values under a key."""
        return self._section(key, self.raw.get(key))

    def sections(self, key: str) -> Iterator[Values]:
        """A list of those; no list is an empty one."""
        for number, item in enumerate(self._items(key)):
            yield self._section(f"{key}.{number}", item)

    def _section(self, key: str, value: object) -> Values:
        if not isinstance(value, Mapping):
            raise self._refused(key, "to be an object", value)
        return Values(value, self.source, self._named(key))

    def _items(self, key: str) -> list[Any]:
        value = self.raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._refused(key, "to be a list", value)
        return value

    def _named(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _refused(self, key: str, expected: str, value: object) -> InputError:
        got = "nothing" if value is None else ascii(value)  # it goes to a terminal
        shown = got if len(got) <= 60 else f"{got[:60]}..."
        return InputError(f"Expected {self._named(key)} {expected} in {self.source}, got {shown}.")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


# Who knows a seed knows the noise. A report is for showing around.
_SECRET = ("seed", "seeds")
_DEEPEST = 8
_LONGEST_SETTINGS = 400  # characters of one value


def flattened(values: Mapping[str, Any]) -> dict[str, str]:
    """Labels joined by dots; what was left open is left out, and so are seeds.

    >>> flattened({"seed": 7, "model": {"name": "mlp", "hidden": [128, 64], "bias": None}})
    {'model.name': 'mlp', 'model.hidden': '128, 64'}
    """
    return dict(_lines(values, "", 0))


def _lines(values: Mapping[str, Any], place: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if key in _SECRET or value is None:
            continue
        label = f"{place}.{key}" if place else str(key)
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _lines(value, label, depth + 1)
        else:
            yield fit(label[:_LONGEST_SETTINGS]), fit(_shown(value))


def _shown(value: object) -> str:
    if isinstance(value, list):
        text = ", ".join(map(_shown, value[:50]))
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST_SETTINGS else f"{text[:_LONGEST_SETTINGS]}..."


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
            tradeoff=values.part("tradeoff", TradeOff),
            inference=values.part("inference", Inference),
            rule=values.part("threshold_rule", ThresholdRule),
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

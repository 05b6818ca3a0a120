"""One audit as shown in a report, restored from the plain values of its result."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dpaudit import stats
from dpaudit.diagnostics import Diagnosis
from dpaudit.report._plot_data import PlotData
from dpaudit.report._svg import number
from dpaudit.stats import number as read_number
from dpaudit.stats._block import Block

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ClaimSummary:
    """A claim as one line, and its numbers."""

    summary: str
    epsilon: float
    delta: float
    parts: tuple[stats.ClaimPart, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClaimSummary:
        """Restore a claim from the values of a result."""
        return cls(
            summary=_text(values["summary"]),
            epsilon=read_number(values, "epsilon"),
            delta=read_number(values, "delta", high=1.0),
            parts=tuple(map(stats.ClaimPart.from_dict, values.get("parts", ()))),
        )


@dataclass(frozen=True)
class MethodBound:
    """A bound by one method, and the epsilon to compare with the claim, if any."""

    name: str
    bound: stats.Bound
    claim_epsilon: float | None

    @property
    def epsilon(self) -> float:
        """The epsilon of the bound itself."""
        return self.bound.epsilon

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; guesses have no rates and hence no counts."""
        values = self.bound.to_dict()
        counts = values["counts"] if isinstance(self.bound.counts, stats.ErrorCounts) else None
        compared = None if self.claim_epsilon is None else stats.plain(self.claim_epsilon)
        return {"name": self.name, **values, "claim_epsilon": compared, "counts": counts}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One audit: the claim, the result, and the method.

    ``values`` are those of ``Result.to_dict()`` or ``result.json``, from which the other attributes of the
    audit were restored. ``settings`` are labeled lines about the configuration, ``remarks`` the notes that
    are about the directory of the run, ``seal`` is the digest of its manifest, if it has one. ``counted``
    names the source of one observation, such as "step" or "trial".
    """

    name: str
    values: Mapping[str, Any] = field(repr=False)
    block: Block
    """What every form of the result shows first."""
    verdict: stats.Verdict | None
    """None without a claim."""
    sentence: str
    claim: ClaimSummary
    bound: stats.Bound
    power: stats.Power | None
    attack_power: stats.Power | None = None
    """The power of the attack as observed; None if it is that of the design."""
    p_value: float | None = None
    """None without a claim."""
    estimate: stats.Estimate | None = None
    """None if the run was stopped at a violation, or if all canaries are of one model."""
    methods: tuple[MethodBound, ...] = ()
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    refuted: tuple[str, ...] | None = None
    """What is refuted, "privacy" or "mechanism"; None if bound and diagnosis do not share an error rate."""
    diagnosis: Diagnosis | None = None
    likely_causes: tuple[str, ...] = ()
    """Possible causes of the violation, or of the findings of the diagnosis."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Labeled lines about the training run."""
    details: tuple[tuple[str, str], ...] = ()
    """Everything that the result says, as labels and sentences."""
    settings: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    seal: str | None = None
    figures: PlotData = field(default_factory=PlotData)
    counted: str = "step"

    @classmethod
    def of(
        cls,
        result: stats.Result,
        observations: stats.Observations | None = None,
        *,
        name: str,
        diagnosis: Diagnosis | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Run:
        """Describe an audit that ``dpaudit run`` did not make: by an observer, or from given scores.

        A ``diagnosis`` that is not part of the result is shown beside it, with its own error rate.
        """
        values = result.to_dict()
        if diagnosis is not None:
            causes = list(diagnosis.likely_causes())
            values |= {"refuted": None, "diagnosis": diagnosis.to_dict(), "likely_causes": causes}
        is_stepped = observations is not None and observations.is_stepped
        return cls.from_dict(
            values,
            name=name,
            settings=flattened(settings or {}),
            figures=PlotData.of(observations, result.bound, result.hypothesis),
            counted="step" if is_stepped else "observation",
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, name: str, **more: Any) -> Run:
        """Restore an audit from the values of its result; ``more`` are the attributes that these lack.

        A value that is missing or of another type raises ``InputError``, ``KeyError`` or ``TypeError``.
        """
        claim, word = ClaimSummary.from_dict(values["claim"]), values["verdict"]
        notes = *_texts(values, "notes"), *more.get("remarks", ())
        power = None if word is None else stats.Power.from_dict(values["power"])
        attack_power = _optional(stats.Power.from_dict, values, "attack_power")
        estimate = _optional(stats.Estimate.from_dict, values, "estimate")
        return cls(
            name=name,
            values=values,
            block=Block.of(values),
            verdict=None if word is None else stats.Verdict[word],
            sentence=_text(values["sentence"] or "No verdict: without a claim, there is nothing to refute."),
            claim=claim,
            bound=stats.Bound.from_dict(values["bound"]),
            power=power,
            attack_power=attack_power,
            p_value=None if values.get("p_value") is None else read_number(values, "p_value", high=1.0),
            estimate=estimate,
            methods=tuple(_methods(values.get("methods", ()), claim.delta)),
            notes=notes,
            not_covered=_texts(values, "not_covered"),
            refuted=_texts(values, "refuted") if values.get("refuted") is not None else None,
            diagnosis=_optional(Diagnosis.from_dict, values, "diagnosis"),
            likely_causes=_texts(values, "likely_causes"),
            facts=dict(training_facts(values)),
            details=tuple(stats.details({**values, "notes": notes}, power, attack_power, estimate)),
            **more,
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the bound and the tests assume."""
        return (*self.bound.assumptions, *(() if self.diagnosis is None else self.diagnosis.assumptions))

    @property
    def verdict_bound(self) -> MethodBound:
        """The bound that the verdict rests on, as one of the methods."""
        return MethodBound("verdict", self.bound, self.bound.epsilon)

    @property
    def provenance(self) -> dict[str, str]:
        """Labeled lines about the origin of the numbers."""
        return flattened(self.values.get("provenance") or {}, hidden=())

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the software."""
        origin = self.values.get("provenance") or {}
        return flattened({**origin.get("packages", {}), **{k: origin.get(k) for k in ("python", "platform")}})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, as described by the schema."""
        stored = ("verdict", "refuted", "power", "attack_power", "p_value", "estimate")
        shown = ("name", "sentence", "facts", "settings", "versions", "provenance", "seal", "counted")
        return {
            **{key: self.values.get(key) for key in stored},
            **{key: getattr(self, key) for key in shown},
            "claim": self.values["claim"],
            "bound": self.verdict_bound.to_dict(),
            "methods": [method.to_dict() for method in self.methods],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "diagnosis": self.values.get("diagnosis"),
            "likely_causes": list(self.likely_causes),
            "figures": self.figures.to_dict(),
        }


def _text(value: Any) -> str:
    """Return a string, or raise: what is not printed as it is has to be a number."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _texts(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(map(_text, values.get(key, ())))


def _optional(restore: Callable[[Mapping[str, Any]], T], values: Mapping[str, Any], key: str) -> T | None:
    return None if values.get(key) is None else restore(values[key])


def _methods(rows: Sequence[Mapping[str, Any]], delta: float) -> Iterator[MethodBound]:
    """Yield the bounds of all methods; bounds on steps also have an epsilon for the whole training run.

    A bound at delta = 0, such as Katz's interval, cannot be compared with a claim at another delta.
    """
    key = "epsilon" if all(row.get("training_epsilon") is None for row in rows) else "training_epsilon"
    for row in rows:
        is_comparable = row[key] is not None and (key != "epsilon" or row["delta"] == delta)
        compared = read_number(row, key) if is_comparable else None
        yield MethodBound(_text(row["name"]), stats.Bound.from_dict(row), compared)


_NUMBERS = {
    "num_canaries": ("canaries", ",.0f"),
    "num_parameters": ("parameters", ",.0f"),
    "noise_multiplier": ("noise multiplier", ".6g"),
    "sample_rate": ("sample rate", ".6g"),
    "accuracy": ("test accuracy", ".3f"),
    "models_per_second": ("models per second", ".3g"),
    "training_seconds": ("training seconds", ",.1f"),
}
"""Labels and forms of numbers of a training run."""


def training_facts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labeled facts about the training run, or the many of them, behind the values of a result."""
    for key in ("mode", "threat_model"):
        if values.get(key) is not None:
            yield key.replace("_", " "), _text(values[key])
    if values.get("num_done") is not None:
        done, planned = (read_number(values, key) for key in ("num_done", "num_steps"))
        early = ", stopped at the first violation" if values["stopped_early"] is True else ""
        yield "steps", f"{done:,.0f} of {planned:,.0f}{early}"
    if values.get("num_models") is not None:
        best = number(read_number(values, "largest_epsilon"))
        yield "at best", f"epsilon >= {best} by an attack without a single error"
        total, lost = (read_number(values, key) for key in ("num_models", "num_failed"))
        yield "models", f"{total - lost:,.0f} of {total:,.0f}"
    numbers = {**values, **values.get("timing", {})}
    for key, (label, form) in _NUMBERS.items():
        if numbers.get(key) is not None:
            yield label, f"{read_number(numbers, key):{form}}"


METHODS_HEADER = ("method", "threshold", "kind", "epsilon", "comparable to the claim")


def method_row(method: MethodBound) -> list[str]:
    """Return the row of a method in the table of all methods."""
    bound, compared = method.bound, number(method.claim_epsilon)
    return [method.name, bound.threshold_rule.label, str(bound.kind), number(bound.epsilon), compared]


_LONGEST_SETTING = 400  # characters of one value


def flattened(values: Mapping[str, Any], *, hidden: Container[str] = ("seed", "seeds")) -> dict[str, str]:
    """Return nested settings as text, with keys joined by dots, without ``hidden`` keys and unset values.

    By default, seeds are hidden: a seed determines the noise, and reports are shared.

    >>> flattened({"seed": 7, "model": {"name": "mlp", "hidden": [128, 64], "bias": None}})
    {'model.name': 'mlp', 'model.hidden': '128, 64'}
    """
    return dict(_lines(values, "", 0, hidden))


def _lines(
    values: Mapping[str, Any], prefix: str, depth: int, hidden: Container[str]
) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if key in hidden or value is None:
            continue
        label = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and depth < 8:
            yield from _lines(value, label, depth + 1, hidden)
        else:
            yield printable(label[:_LONGEST_SETTING]), printable(_formatted(value))


def _formatted(value: object) -> str:
    if isinstance(value, list):
        text = ", ".join(map(_formatted, value[:50]))
    elif isinstance(value, Mapping):
        text = "; ".join(f"{key} {_formatted(item)}" for key, item in value.items())
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]}..."


def printable(text: str) -> str:
    """Replace control characters, format characters and lone surrogates.

    >>> printable("a" + chr(27) + "[2J") == "a" + chr(0xFFFD) + "[2J"
    True
    """
    hidden = ("Cc", "Cf", "Cs")  # control, format, surrogate
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in hidden
        else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )

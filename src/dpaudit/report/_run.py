"""One audit as a report shows it, and what a report says of it in every format alike."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpaudit.diagnostics import Diagnosis
from dpaudit.report._figures import Figures
from dpaudit.report._svg import number
from dpaudit.stats import ApproximateDP, Bound, ErrorCounts, Kind, Observations, Power, Result, Verdict
from dpaudit.stats._bound import plain
from dpaudit.stats._result import summary as result_summary


@dataclass(frozen=True, kw_only=True)
class ClaimSummary:
    """The claim in a line, and its numbers; ``parameter`` is in terms of the bound's trade-off."""

    summary: str
    epsilon: float
    delta: float
    parameter: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "summary": self.summary,
            "epsilon": plain(self.epsilon),
            "delta": self.delta,
            "parameter": plain(self.parameter),
        }


@dataclass(frozen=True)
class MethodBound:
    """A bound by one method, and its epsilon for what the claim is of, None where that cannot be compared."""

    name: str
    bound: Bound
    claim_epsilon: float | None

    @property
    def epsilon(self) -> float:
        """The epsilon of the bound itself."""
        return self.bound.epsilon

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; guesses have no rates, and so no counts."""
        values = self.bound.to_dict()
        counts = values["counts"] if isinstance(self.bound.counts, ErrorCounts) else None
        compared = None if self.claim_epsilon is None else plain(self.claim_epsilon)
        return {"name": self.name, **values, "claim_epsilon": compared, "counts": counts}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was claimed, what was found, and with what.

    ``facts``, ``settings`` and ``versions`` are lines with a label each, of the training, of its
    configuration and of what it was made with. ``counted`` is what an observation is of: "step", "trial".
    """

    name: str
    verdict: Verdict | None
    """None where nothing is claimed."""
    sentence: str
    claim: ClaimSummary
    bound: Bound
    power: Power | None
    methods: tuple[MethodBound, ...] = ()
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    likely_causes: tuple[str, ...] = ()
    """What may be behind the findings of the diagnosis."""
    facts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    counted: str = "step"

    @classmethod
    def of(
        cls,
        result: Result,
        observations: Observations | None = None,
        *,
        name: str,
        diagnosis: Diagnosis | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Run:
        """From an audit that was not made by ``dpaudit run``: an observer's, or one of given scores."""
        claim = ClaimSummary(
            summary=result.claim.summary,
            epsilon=result.claim.epsilon,
            delta=result.claim.delta,
            parameter=result.hypothesis.parameter,
        )
        figures = Figures.of(
            observations,
            claimed=claim.parameter,
            bound=result.bound,
            tradeoff=result.hypothesis.tradeoff,
            hypothesis=result.hypothesis,
        )
        stepped = observations is not None and observations.is_stepped
        return cls(
            name=name,
            verdict=result.verdict,
            sentence=result.sentence,
            claim=claim,
            bound=result.bound,
            power=result.power,
            not_covered=result.not_covered,
            diagnosis=diagnosis,
            likely_causes=() if diagnosis is None else diagnosis.likely_causes(),
            settings=flattened(settings or {}),
            figures=figures,
            counted="step" if stepped else "observation",
        )

    @property
    def verdict_bound(self) -> MethodBound:
        """The bound that the verdict rests on, as one among the methods."""
        return MethodBound("the verdict's", self.bound, self.bound.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as the schema says."""
        return {
            "name": self.name,
            "verdict": None if self.verdict is None else self.verdict.name,
            "sentence": self.sentence,
            "claim": self.claim.to_dict(),
            "bound": self.verdict_bound.to_dict(),
            "power": None if self.power is None else self.power.to_dict(),
            "methods": [method.to_dict() for method in self.methods],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "diagnosis": None if self.diagnosis is None else self._diagnosis_values(self.diagnosis),
            "facts": dict(self.facts),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "counted": self.counted,
            "figures": self.figures.to_dict(),
        }

    def _diagnosis_values(self, found: Diagnosis) -> dict[str, Any]:
        shown = ("name", "p_value", "adjusted", "sentence")
        return {
            "confidence": found.confidence,
            "tests": [{"name": one.name, "p_value": one.p_value} for one in found.checks],
            "findings": [{key: getattr(one, key) for key in shown} for one in found.findings],
            "likely_causes": list(self.likely_causes),
            "notes": list(found.notes),
        }


_MARKS = {
    Verdict.VIOLATION: ("\N{BLACK UP-POINTING TRIANGLE}", "Violation"),
    Verdict.NO_VIOLATION: ("\N{WHITE CIRCLE}", "No violation"),
    Verdict.UNDERPOWERED: ("\N{WHITE DIAMOND}", "Underpowered"),
}


def verdict_mark(verdict: Verdict | None) -> tuple[str, str]:
    """A sign and the word: never a colour alone."""
    return ("\N{WHITE SQUARE}", "No claim") if verdict is None else _MARKS[verdict]


def smallest_leak(run: Run) -> str:
    """The epsilon that would show."""
    return "none" if run.power is None or math.isinf(run.power.epsilon) else number(run.power.epsilon)


COMPARISON_HEADER = (
    "run",
    "verdict",
    "claimed epsilon",
    "epsilon at least",
    "confidence",
    "smallest leak that would show",
)


def comparison_row(run: Run) -> list[str]:
    """One run in the table of several."""
    return [
        run.name,
        verdict_mark(run.verdict)[1],
        number(run.claim.epsilon),
        number(run.bound.epsilon),
        f"{100 * run.bound.confidence:g} %",
        smallest_leak(run),
    ]


def headline(run: Run) -> str:
    """The verdict in a sentence, with its numbers."""
    claimed, least, sureness = number(run.claim.epsilon), number(run.bound.epsilon), _sureness(run)
    if run.verdict is None:
        return f"Nothing is claimed: epsilon is at least {least}, {sureness}."
    if run.verdict is Verdict.UNDERPOWERED:
        return f"The claim of epsilon {claimed} could not be tested: there are too few observations."
    if run.verdict is Verdict.NO_VIOLATION:
        return f"The claim of epsilon {claimed} is not refuted: epsilon is at least {least}, {sureness}."
    if isinstance(run.bound.tradeoff, ApproximateDP):  # the one curve that assumes no mechanism at any delta
        return f"The claim of epsilon {claimed} is refuted: epsilon is at least {least}, {sureness}."
    # what is refuted is the claimed curve: a mechanism of another kind might leak that and keep its epsilon
    return (
        f"The claim is refuted: the claimed kind of mechanism needs an epsilon of at least {least} to leak "
        f"what was seen, and {claimed} is claimed, {sureness}."
    )


def _sureness(run: Run) -> str:
    """How sure the bound is, in the words of its kind."""
    level = f"{100 * run.bound.confidence:g} %"
    match run.bound.kind:
        case Kind.CONFIDENCE:
            return f"with {level} confidence"
        case Kind.CREDIBLE:
            return f"with {level} credibility, which depends on a prior"
    return "by a heuristic, whose error rate is not known"


def summary(run: Run) -> list[tuple[str, str]]:
    """Claim, bound, its kind, method, power and tests of the noise, a sentence each."""
    claim, bound, *rest = result_summary(run.claim.summary, run.bound, run.power)
    tests = "not run" if run.diagnosis is None else _findings(run.diagnosis)
    return [claim, bound, ("kind", _KINDS[run.bound.kind]), *rest, ("tests of the noise", tests)]


_KINDS = {
    Kind.CONFIDENCE: "a confidence bound: it exceeds the truth at most as often as it says",
    Kind.CREDIBLE: "a credible bound: it depends on a prior",
    Kind.HEURISTIC: "a heuristic: no error rate is known",
}


def _findings(diagnosis: Diagnosis) -> str:
    names = ", ".join(one.name for one in diagnosis.findings)
    return f"found {names}" if names else "nothing found"


def diagnosis_sentences(diagnosis: Diagnosis) -> tuple[str, str]:
    """How many findings there are, and how they stand to the verdict."""
    count = len(diagnosis.findings)
    found = {0: "Nothing was found", 1: "1 finding"}.get(count, f"{count} findings")
    level = f"{100 * diagnosis.confidence:g} % confidence for all together"
    meaning = "Their error is beside that of the bound, and the verdict does not rest on them."
    if diagnosis.findings:
        meaning += " A finding says that the training is not what was accounted for, nothing of epsilon."
    return f"{found} by {len(diagnosis.checks)} tests, {level}.", meaning


# Who knows a seed knows the noise. A report is for showing around.
_SECRET = ("seed", "seeds")
_DEEPEST_SETTING = 8
_LONGEST_SETTING = 400  # characters of one value
_KEPT = "\n\t"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        if isinstance(value, Mapping) and depth < _DEEPEST_SETTING:
            yield from _lines(value, label, depth + 1)
        else:
            yield fit(label[:_LONGEST_SETTING]), fit(_shown(value))


def _shown(value: object) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(_shown, value[:50]))
    elif isinstance(value, bool):
        shown = "yes" if value else "no"
    elif isinstance(value, float):
        shown = f"{value:.6g}"
    else:
        shown = str(value)
    return shown if len(shown) <= _LONGEST_SETTING else f"{shown[:_LONGEST_SETTING]}..."


def fit(text: str) -> str:
    """Return the text without what moves a terminal's cursor, turns the direction of letters, or is none.

    >>> fit("a" + chr(27) + "[2J") == "a" + chr(0xFFFD) + "[2J"
    True
    """
    return "".join(one if one in _KEPT or _is_shown(one) else _REPLACEMENT for one in text)


def _is_shown(one: str) -> bool:
    # control characters, those of format such as a change of direction, and halves of a pair
    return unicodedata.category(one) not in ("Cc", "Cf", "Cs")

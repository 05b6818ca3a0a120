"""One audit as shown in a report, and the sentences and tables shared by all formats of a report."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpaudit import _validate
from dpaudit.diagnostics import Diagnosis
from dpaudit.diagnostics._diagnosis import findings_sentence
from dpaudit.report._plot_data import PlotData
from dpaudit.report._svg import number
from dpaudit.stats import (
    PRIVACY,
    ApproximateDP,
    Bound,
    ClaimPart,
    ErrorCounts,
    Estimate,
    Kind,
    Observations,
    Power,
    Result,
    Verdict,
    errors_line,
    plain,
)
from dpaudit.stats import summary as result_summary


@dataclass(frozen=True, kw_only=True)
class ClaimSummary:
    """A claim as one line, and its numbers; ``parameter`` belongs to the bound's trade-off."""

    summary: str
    epsilon: float
    delta: float
    parameter: float
    parts: tuple[ClaimPart, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "summary": self.summary,
            "epsilon": plain(self.epsilon),
            "delta": self.delta,
            "parameter": plain(self.parameter),
            "parts": [component.to_dict() for component in self.parts],
        }


@dataclass(frozen=True)
class MethodBound:
    """A bound by one method, and the epsilon to compare with the claim, if any."""

    name: str
    bound: Bound
    claim_epsilon: float | None

    @property
    def epsilon(self) -> float:
        """The epsilon of the bound itself."""
        return self.bound.epsilon

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; guesses have no rates and hence no counts."""
        values = self.bound.to_dict()
        counts = values["counts"] if isinstance(self.bound.counts, ErrorCounts) else None
        compared = None if self.claim_epsilon is None else plain(self.claim_epsilon)
        return {"name": self.name, **values, "claim_epsilon": compared, "counts": counts}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One audit: the claim, the result, and the method.

    ``facts``, ``settings``, ``versions`` and ``provenance`` are labeled lines about the training run, its
    configuration, its software and its origin. ``seal`` is the digest of its manifest, if it has one.
    ``counted`` names the source of one observation, such as "step" or "trial".
    """

    name: str
    verdict: Verdict | None
    """None without a claim."""
    sentence: str
    claim: ClaimSummary
    bound: Bound
    power: Power | None
    attack_power: Power | None = None
    """The power of the attack as observed; None if it is that of the design."""
    p_value: float | None = None
    """None without a claim."""
    estimate: Estimate | None = None
    """None if the run was made by a version without estimates."""
    methods: tuple[MethodBound, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    """The notes that are about the directory of the run: what could not be checked or derived again."""
    not_covered: tuple[str, ...] = ()
    refuted: tuple[str, ...] | None = None
    """What is refuted, "privacy" or "mechanism"; None if bound and diagnosis do not share an error rate."""
    diagnosis: Diagnosis | None = None
    likely_causes: tuple[str, ...] = ()
    """Possible causes of the violation, or of the findings of the diagnosis."""
    facts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    seal: str | None = None
    figures: PlotData = field(default_factory=PlotData)
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
        """Describe an audit that ``dpaudit run`` did not make: by an observer, or from given scores.

        A ``diagnosis`` that is not part of the result is shown beside it, with its own error rate.
        """
        is_joint = diagnosis is None
        diagnosis = result.diagnosis if diagnosis is None else diagnosis
        claim = ClaimSummary(
            summary=result.claim.summary,
            epsilon=result.claim.epsilon,
            delta=result.claim.delta,
            parameter=result.hypothesis.parameter,
            parts=result.claim.parts,
        )
        figures = PlotData.of(
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
            attack_power=result.attack_power,
            p_value=result.p_value,
            notes=result.notes,
            estimate=result.estimate,
            not_covered=result.not_covered,
            refuted=result.refuted if is_joint else None,
            diagnosis=diagnosis,
            likely_causes=result.likely_causes()
            if diagnosis is None or is_joint
            else diagnosis.likely_causes(),
            settings=flattened(settings or {}),
            provenance=flattened(result.provenance or {}, hidden=()),
            figures=figures,
            counted="step" if stepped else "observation",
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the bound and the tests assume."""
        return (*self.bound.assumptions, *(() if self.diagnosis is None else self.diagnosis.assumptions))

    @property
    def verdict_bound(self) -> MethodBound:
        """The bound that the verdict rests on, as one of the methods."""
        return MethodBound("verdict", self.bound, self.bound.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, as described by the schema."""
        return {
            "name": self.name,
            "verdict": None if self.verdict is None else self.verdict.name,
            "refuted": None if self.refuted is None else list(self.refuted),
            "sentence": self.sentence,
            "claim": self.claim.to_dict(),
            "bound": self.verdict_bound.to_dict(),
            "power": None if self.power is None else self.power.to_dict(),
            "attack_power": None if self.attack_power is None else self.attack_power.to_dict(),
            "p_value": self.p_value,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "methods": [method.to_dict() for method in self.methods],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "diagnosis": None if self.diagnosis is None else self._diagnosis_values(self.diagnosis),
            "likely_causes": list(self.likely_causes),
            "facts": dict(self.facts),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "provenance": dict(self.provenance),
            "seal": self.seal,
            "counted": self.counted,
            "figures": self.figures.to_dict(),
        }

    def _diagnosis_values(self, diagnosis: Diagnosis) -> dict[str, Any]:
        keys = ("name", "p_value", "adjusted", "sentence")
        return {
            "confidence": diagnosis.confidence,
            "tests": [{"name": check.name, "p_value": check.p_value} for check in diagnosis.checks],
            "findings": [{key: getattr(finding, key) for key in keys} for finding in diagnosis.findings],
            "likely_causes": list(self.likely_causes),
            "notes": list(diagnosis.notes),
            "assumptions": list(diagnosis.assumptions),
        }


def verdict_mark(verdict: Verdict | None) -> tuple[str, str]:
    """Return a symbol and a word for a verdict: color alone is never enough."""
    marks = {
        None: ("\N{WHITE SQUARE}", "No claim"),
        Verdict.VIOLATION: ("\N{BLACK UP-POINTING TRIANGLE}", "Violation"),
        Verdict.NO_VIOLATION: ("\N{WHITE CIRCLE}", "No violation"),
        Verdict.UNDERPOWERED: ("\N{WHITE DIAMOND}", "Underpowered"),
    }
    return marks[verdict]


def smallest_leak(run: Run) -> str:
    """Return the epsilon of the smallest detectable leak."""
    return "none" if run.power is None or math.isinf(run.power.epsilon) else number(run.power.epsilon)


COMPARISON_HEADER = (
    "run",
    "verdict",
    "claimed epsilon",
    "lower bound on epsilon",
    "confidence",
    "smallest detectable leak",
)


def comparison_row(run: Run) -> list[str]:
    """Return the row of a run in the table of several runs."""
    return [
        run.name,
        verdict_mark(run.verdict)[1],
        number(run.claim.epsilon),
        number(run.bound.epsilon),
        _validate.percent(run.bound.confidence),
        smallest_leak(run),
    ]


METHODS_HEADER = ("method", "threshold", "kind", "epsilon", "comparable to the claim")


def method_row(method: MethodBound) -> list[str]:
    """Return the row of a method in the table of all methods."""
    bound, compared = method.bound, number(method.claim_epsilon)
    return [method.name, bound.threshold_rule.label, str(bound.kind), number(bound.epsilon), compared]


def headline(run: Run) -> str:
    """Return the verdict as a sentence with its numbers."""
    claimed, least, sureness = number(run.claim.epsilon), number(run.bound.epsilon), _sureness(run)
    if run.verdict is None:
        return f"There is no claim: epsilon is at least {least}, {sureness}."
    if run.verdict is Verdict.UNDERPOWERED:
        return f"The claim of epsilon {claimed} could not be tested: twice of it could have gone undetected."
    if run.verdict is Verdict.NO_VIOLATION:
        return f"The claim of epsilon {claimed} is not refuted: epsilon is at least {least}, {sureness}."
    if run.refuted is not None and PRIVACY not in run.refuted:
        return (
            "The tests refute that this is the claimed mechanism, so its epsilon does not describe this run: "
            f"{claimed} is claimed, and epsilon is at least {least}, {sureness}."
        )
    if isinstance(run.bound.tradeoff, ApproximateDP):  # the one curve that assumes no mechanism at any delta
        return f"The claim of epsilon {claimed} is refuted: epsilon is at least {least}, {sureness}."
    # only the claimed curve is refuted: another kind of mechanism might leak as much within its epsilon
    return (
        f"The claim is refuted {sureness}: a mechanism of the claimed kind that leaks this much has an "
        f"epsilon of at least {least}, but {claimed} is claimed."
    )


def _sureness(run: Run) -> str:
    """Return the certainty of the bound, with the meaning of a kind that gives no confidence."""
    level, kind = _validate.percent(run.bound.confidence), run.bound.kind
    return {
        Kind.CONFIDENCE: f"with {level} confidence",
        Kind.CREDIBLE: f"with {level} credibility ({kind.meaning})",
        Kind.HEURISTIC: f"by a heuristic ({kind.meaning})",
    }[kind]


def summary(run: Run) -> list[tuple[str, str]]:
    """Return the claim, bound, kind, method, power, estimates and noise tests as labels and sentences."""
    lines = result_summary(
        run.claim.summary,
        run.bound,
        run.power,
        parts=run.claim.parts,
        attack_power=run.attack_power,
        p_value=run.p_value if run.verdict is Verdict.VIOLATION else None,
    )
    tests = "not run"
    if run.diagnosis is not None:
        names = ", ".join(finding.name for finding in run.diagnosis.findings)
        tests = f"flagged by {names}" if names else "no findings"
    kind = f"{run.bound.kind}: {run.bound.kind.meaning}"
    estimates = [] if run.estimate is None else run.estimate.lines(brief=False)
    after_bound = [label for label, _ in lines].index("bound") + 1
    lines.insert(after_bound, ("kind", kind))
    return [*lines, *estimates, ("noise tests", tests), *_errors(run)]


def _errors(run: Run) -> list[tuple[str, str]]:
    """Return how bound and tests share the error rate, if they do."""
    if run.refuted is None or run.diagnosis is None:
        return []
    return [("errors", errors_line(run.bound, run.diagnosis))]


def diagnosis_sentences(run: Run, diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the number of findings, and how they relate to the verdict."""
    meaning = "These tests have their own error rate, and the verdict does not rest on them."
    if run.refuted is not None:
        meaning = "Bound and tests share one error rate, and the verdict rests on both."
    if diagnosis.findings:
        meaning += (
            " A finding means that the accounting does not describe this training run; it does not bound "
            "epsilon."
        )
    return findings_sentence(diagnosis), meaning


def provenance_lines(run: Run) -> dict[str, str]:
    """Return where the numbers come from, and the seal of the run's directory; empty if neither is known."""
    seal = {} if run.seal is None else {"seal": f"{run.seal} (digest of manifest.json)"}
    return {**run.provenance, **seal}


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

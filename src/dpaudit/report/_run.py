"""One audit as a report shows it.

What a report says, in every format alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpaudit.diagnostics import Diagnosis
from dpaudit.errors import InputError
from dpaudit.report._figures import Figures
from dpaudit.report._svg import number
from dpaudit.report._values import BoundValues, ClaimValues, DiagnosisValues, Values, flattened, read_power
from dpaudit.stats import Kind, Observations, Power, Result, Verdict

_ROUNDING = 0.01  # of epsilon: a claim's is accounted from above, a bound's from below
_NOTHING = "No verdict: where nothing is claimed, nothing can be refuted."


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
    claim: ClaimValues
    bound: BoundValues
    power: Power | None
    methods: tuple[BoundValues, ...] = ()
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    diagnosis: DiagnosisValues | None = None
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
        raw = {**result.to_dict(), "diagnosis": None if diagnosis is None else diagnosis.to_dict()}
        audit = read_audit(Values(raw, name))
        figures = Figures.of(
            observations,
            claim=audit["claim"],
            bound=audit["bound"],
            tradeoff=result.hypothesis.tradeoff,
            hypothesis=result.hypothesis,
        )
        stepped = observations is not None and observations.is_stepped
        return cls(
            name=name,
            figures=figures,
            settings=flattened(settings or {}),
            counted="step" if stepped else "observation",
            **audit,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as the schema says."""
        return {
            "name": self.name,
            "verdict": None if self.verdict is None else self.verdict.name,
            "sentence": self.sentence,
            "claim": self.claim.to_dict(),
            "bound": self.bound.to_dict(),
            "power": None if self.power is None else self.power.to_dict(),
            "methods": [method.to_dict() for method in self.methods],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_dict(),
            "facts": dict(self.facts),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "counted": self.counted,
            "figures": self.figures.to_dict(),
        }


def read_audit(values: Values) -> dict[str, Any]:
    """The parts of a run that come from its result, checked."""
    section = values.section("bound")
    diagnosed = values.has("diagnosis")
    claim, verdict = ClaimValues.read(values.section("claim")), _verdict(values)
    bound = BoundValues.read(section, section.number("epsilon"), name="the verdict's")
    if verdict is not None:
        _require_consistent(verdict, claim, bound, values.source)
    return {
        "verdict": verdict,
        "sentence": _NOTHING if verdict is None else _sentence(verdict, values.text("sentence")),
        "claim": claim,
        "bound": bound,
        "power": None if verdict is None else read_power(values.section("power")),
        "methods": BoundValues.read_all(values, claim.delta),
        "notes": values.texts("notes"),
        "not_covered": values.texts("not_covered"),
        "diagnosis": DiagnosisValues.read(values.section("diagnosis")) if diagnosed else None,
    }


def _verdict(values: Values) -> Verdict | None:
    if not values.has("verdict") and values.section("claim").number("epsilon") == math.inf:
        return None
    word = values.text("verdict")
    if word not in Verdict.__members__:
        raise InputError(
            f"Expected verdict to be {', '.join(Verdict.__members__)} in {values.source}, got {word[:60]!a}."
        )
    return Verdict[word]


def _sentence(verdict: Verdict, text: str) -> str:
    """The verdict's own, whatever the file says; only the condition of a violation is the file's."""
    _, holds, condition = text.partition(" This holds if ")
    return f"{verdict.value}{holds}{condition}" if verdict is Verdict.VIOLATION else verdict.value


def _require_consistent(verdict: Verdict, claim: ClaimValues, bound: BoundValues, source: str) -> None:
    """Refuse a verdict that no audit gives for such a bound and such a claim."""
    if bound.kind is not Kind.CONFIDENCE:
        raise InputError(
            f"Expected the verdict in {source} to rest on a confidence bound, got a {bound.kind} one."
        )
    refutes = verdict is Verdict.VIOLATION
    if refutes is not (bound.parameter > claim.parameter) or _is_wrong_side(refutes, claim, bound):
        raise InputError(
            f"Expected the verdict in {source} to follow from its bound and its claim, got {verdict.name} "
            f"with a parameter of {bound.parameter:.4g} (epsilon {bound.epsilon:.4g}) where "
            f"{claim.parameter:.4g} (epsilon {claim.epsilon:.4g}) is claimed."
        )


def _is_wrong_side(refutes: bool, claim: ClaimValues, bound: BoundValues) -> bool:
    """Whether the epsilons say the opposite; a bound of 0 says nothing, and none is above infinity."""
    if refutes:
        return 0 < bound.epsilon < claim.epsilon * (1 - _ROUNDING) < math.inf
    return bound.epsilon > claim.epsilon * (1 + _ROUNDING)


_OF_ANY_MECHANISM = "ApproximateDP"  # the one curve that assumes no mechanism at any delta
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
    if run.bound.tradeoff.startswith(_OF_ANY_MECHANISM):
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
    """Claim, bound, method, power and tests of the noise, a sentence each."""
    return [
        ("claim", run.claim.summary),
        ("bound", run.bound.statement),
        ("kind", _KINDS[run.bound.kind.value]),
        ("method", run.bound.method),
        *(() if run.power is None else [("power", str(run.power))]),
        ("tests of the noise", "not run" if run.diagnosis is None else run.diagnosis.short),
    ]


_KINDS = {
    "confidence": "a confidence bound: it exceeds the truth at most as often as it says",
    "credible": "a credible bound: it depends on a prior",
    "heuristic": "a heuristic: no error rate is known",
}

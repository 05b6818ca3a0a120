"""The result of an audit: verdict, bound, tests, power and tested hypothesis."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._html import result_html
from dpaudit._plotting import draw_tradeoff
from dpaudit._provenance import of_audit
from dpaudit._types import FloatArray
from dpaudit.diagnostics import Diagnosis, Finding
from dpaudit.diagnostics._diagnosis import joint_causes
from dpaudit.errors import InputError, ViolationError
from dpaudit.stats._binomial import plausible_rate
from dpaudit.stats._bound import LARGEST, Bound, number, plain
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._estimate import Estimate
from dpaudit.stats._observations import Observations
from dpaudit.stats._power import AuditDesign
from dpaudit.stats.tradeoffs import TradeOff

_POINTS = 121
_FULL_LENGTH = 0.995  # of canaries, which is printed if they are shorter
_LEAKIEST = 500.0  # a parameter whose curve coincides with the axes
PRIVACY, MECHANISM = "privacy", "mechanism"
_NOT_PRIVACY = (
    "The bound does not refute the claimed privacy, but the claimed epsilon was computed for a different "
    "mechanism than the one that ran."
)
OTHER_MECHANISM = "The tests refute that this is the claimed mechanism."


class Verdict(Enum):
    """The outcome of an audit; each value is the sentence that explains it."""

    VIOLATION = (
        "The observations refute the claim: they reveal more about the canary than the claimed privacy "
        "allows."
    )
    NO_VIOLATION = (
        "The observations do not refute the claim. This does not prove it: a leak smaller than the smallest "
        "detectable one could have gone undetected."
    )
    UNDERPOWERED = (
        "Too few observations: even an attack without a single error could not have refuted the claim."
    )


def verdict_sentence(verdict: Verdict, refuted: Collection[str], condition: str | None = None) -> str:
    """Return the sentence of a verdict that says what is refuted, and the condition for it, if any."""
    if verdict is not Verdict.VIOLATION:
        return str(verdict.value)
    if PRIVACY not in refuted:
        return f"{OTHER_MECHANISM} {_NOT_PRIVACY}"
    sentence = str(verdict.value) + (f" This holds if {condition}." if condition else "")
    return f"{sentence} {OTHER_MECHANISM}" if MECHANISM in refuted else sentence


@dataclass(frozen=True, kw_only=True)
class Result:
    """Claim, bound, tests, verdict and power of one audit.

    ``diagnosis`` has the tests of the same run, None if there is nothing to test. Bound and tests share one
    error rate and give one verdict; :attr:`refuted` says what it rests on. ``not_covered`` lists, in
    sentences, what the audit did not exercise. ``notes`` are sentences on scores that do not look as they
    were described. ``observations`` are the scores, from which :attr:`estimate` is computed, unless
    ``no_estimate`` is a sentence that says why it would not hold. ``clues`` are further keywords for
    :func:`dpaudit.diagnostics.likely_causes`. ``times`` are when a recorder was created and when audited.
    """

    claim: Claimed
    bound: Bound
    verdict: Verdict
    hypothesis: Hypothesis
    design: AuditDesign
    not_covered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    observations: Observations | None = field(default=None, repr=False, compare=False)
    no_estimate: str | None = None
    diagnosis: Diagnosis | None = None
    clues: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    times: tuple[str, str] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def provenance(self) -> dict[str, Any] | None:
        """Software, machine, commit and time of a recorded run; computed lazily, because it calls git."""
        return None if self.times is None else of_audit(*self.times)

    def joined(self, diagnosis: Diagnosis) -> Result:
        """Return the result with tests of the same run, whose findings refute the claim too."""
        verdict = Verdict.VIOLATION if diagnosis.findings else self.verdict
        return replace(self, diagnosis=diagnosis, verdict=verdict)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the tests, most certain first."""
        return () if self.diagnosis is None else self.diagnosis.findings

    @property
    def refuted(self) -> tuple[str, ...]:
        """What is refuted: the claimed "privacy", that this is the claimed "mechanism", or both.

        The bound refutes the first; the tests refute the second, after which the claimed epsilon says nothing
        about this run.
        """
        privacy = (PRIVACY,) if self.bound.parameter > self.hypothesis.parameter else ()
        return (*privacy, MECHANISM) if self.findings else privacy

    @property
    def confidence(self) -> float:
        """The joint confidence of bound and tests: a correct run is a violation at most this rarely."""
        tests = 0.0 if self.diagnosis is None else 1 - self.diagnosis.confidence
        return round(self.bound.confidence - tests, 12)

    def likely_causes(self) -> tuple[str, ...]:
        """Return likely causes of a violation, best first: hints for a developer, not proof."""
        return joint_causes(self.diagnosis, self.clues) if self.verdict is Verdict.VIOLATION else ()

    @cached_property
    def power(self) -> Power:
        """The smallest leak that this audit would have detected with 80 % probability; computed lazily."""
        leak = self.design.smallest_leak(self.hypothesis.parameter)
        return Power.of(leak, self.hypothesis, 0.8, self.design.lengths)

    @cached_property
    def estimate(self) -> Estimate:
        """The effective noise, its epsilon and the attack's ROC, with intervals; computed lazily.

        It assumes normal scores and is not a bound: the verdict does not rest on it.
        """
        if self.no_estimate is not None:
            return Estimate(confidence=self.confidence, missing=self.no_estimate)
        return Estimate.of(
            self.observations,
            tradeoff=self.hypothesis.tradeoff,
            claimed=self.hypothesis.parameter,
            epsilon=self.hypothesis.epsilon,
            confidence=self.confidence,
        )

    @property
    def sentence(self) -> str:
        """The verdict's sentence: what is refuted, and the condition under which it is, if any."""
        return verdict_sentence(self.verdict, self.refuted, self.hypothesis.condition)

    def raise_for_violation(self) -> None:
        """Raise :class:`dpaudit.ViolationError` if the claim is refuted, by the bound or by the tests."""
        if self.verdict is Verdict.VIOLATION:
            raise ViolationError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.verdict.name}. {self.sentence}"]
        lines += [f"  {label}: {text}" for label, text in self._summary()]
        return "\n".join(lines + [f"  {label}: {text}" for label, texts in self._lists() for text in texts])

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks display."""
        return result_html(self.verdict.name, self.sentence, self._summary(), self._lists())

    def _summary(self) -> list[tuple[str, str]]:
        lines = summary(self.claim.summary, self.bound, self.power, parts=self.claim.parts)
        errors = [] if self.diagnosis is None else [("errors", errors_line(self.bound, self.diagnosis))]
        return [*lines, *self.estimate.lines(brief=True), *errors]

    def _lists(self) -> list[tuple[str, tuple[str, ...]]]:
        return [
            ("finding", tuple(map(str, self.findings))),
            ("possible cause", self.likely_causes()),
            ("assumes", (*self.bound.assumptions, *(self.diagnosis.assumptions if self.diagnosis else ()))),
            ("not covered", self.not_covered),
            ("note", (*self.notes, *(() if self.diagnosis is None else self.diagnosis.notes))),
        ]

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the claimed curve, the curve of the bound, and the measured error rates with their region.

        Requires matplotlib. Return the axes: ``ax`` if given, otherwise new ones.
        """
        counts = self.bound.counts
        if not isinstance(counts, ErrorCounts):
            raise InputError(f"Expected a bound on error rates to plot, got one on {counts!r}.")
        plane = ErrorRatePlane.of(
            counts,
            tradeoff=self.hypothesis.tradeoff,
            claimed=self.hypothesis.parameter,
            bound=self.bound.parameter,
            confidence=self.bound.confidence,
        )
        return draw_tradeoff(plane, ax)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "verdict": self.verdict.name,
            "refuted": list(self.refuted),
            "sentence": self.sentence,
            "claim": {
                "summary": self.claim.summary,
                "epsilon": plain(self.claim.epsilon),
                "delta": self.claim.delta,
                "parameter": plain(self.hypothesis.parameter),
                "parts": [part.to_dict() for part in self.claim.parts],
            },
            "bound": self.bound.to_dict(),
            "power": self.power.to_dict(),
            "estimate": self.estimate.to_dict(),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_dict(),
            "likely_causes": list(self.likely_causes()),
            "not_covered": list(self.not_covered),
            "notes": list(self.notes),
            **({} if self.provenance is None else {"provenance": self.provenance}),
        }


@dataclass(frozen=True, kw_only=True)
class Power:
    """The smallest leak that the audit would have detected with the given probability."""

    probability: float
    epsilon: float
    parameter: float
    # noise of the leak relative to the claimed noise; None if the parameter is not an inverse noise
    noise_factor: float | None
    # mean length of canaries after clipping, in clipping norms; None if it is 1 or not known
    canary_length: float | None = None

    @classmethod
    def of(
        cls, parameter: float, hypothesis: Hypothesis, probability: float, lengths: tuple[float, ...] = (1.0,)
    ) -> Power:
        """Return the leak of a mechanism with the given parameter, detected by canaries of these lengths."""
        scales = hypothesis.tradeoff.is_inverse_noise
        length = float(np.mean(lengths))
        return cls(
            probability=probability,
            epsilon=hypothesis.epsilon(parameter),
            parameter=parameter,
            noise_factor=hypothesis.parameter / parameter if scales else None,
            canary_length=length if length < _FULL_LENGTH else None,
        )

    def __str__(self) -> str:
        if math.isinf(self.parameter):
            return f"no leak would have been detected with {_validate.percent(self.probability)} probability"
        text = f"a true epsilon of {self.epsilon:.4g}"
        if self.noise_factor is not None:
            text += f" (noise at {self.noise_factor:.4g} of the claimed level)"
        percent = _validate.percent(self.probability)
        text += f" would have been detected with {percent} probability by an attack of this design"
        if self.canary_length is not None:
            text += f" (canaries reach {self.canary_length:.2g} of the clipping norm)"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "probability": self.probability,
            "epsilon": plain(self.epsilon),
            "parameter": plain(self.parameter),
            "noise_factor": self.noise_factor,
            **({} if self.canary_length is None else {"canary_length": self.canary_length}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Power:
        """Restore a power from :meth:`to_dict`; invalid values raise ``InputError``."""
        scales = _validate.mapping("the values of a power", values).get("noise_factor") is not None
        return cls(
            probability=number(values, "probability", high=1.0),
            epsilon=number(values, "epsilon"),
            parameter=number(values, "parameter"),
            noise_factor=number(values, "noise_factor", high=LARGEST) if scales else None,
            canary_length=None
            if values.get("canary_length") is None
            else number(values, "canary_length", high=1.0),
        )


def summary(
    claim: str, bound: Bound, power: Power | None, *, parts: Collection[ClaimPart] = ()
) -> list[tuple[str, str]]:
    """Return the labeled lines that every form of a result shows: claim, bound, method and power.

    Where the ``parts`` of the claim come from is shown unless all of them were given.
    """
    lines = [("claim", claim)]
    if any(part.source != GIVEN for part in parts):
        lines.append(("claimed", ", ".join(map(str, parts))))
    lines += [("bound", bound.statement), ("method", bound.label)]
    return lines if power is None else [*lines, ("power", str(power))]


def errors_line(bound: Bound, diagnosis: Diagnosis) -> str:
    """Return how bound and tests share the probability that a correct run is a violation."""
    shares = 1 - bound.confidence, 1 - diagnosis.confidence
    bound_share, tests_share, total = (f"{100 * share:.4g} %" for share in (*shares, sum(shares)))
    tests = f"{len(diagnosis.checks)} {'test' if len(diagnosis.checks) == 1 else 'tests'}"
    return f"{total} in total: {bound_share} for the bound, {tests_share} for {tests}"


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
        _validate.mapping("a part of the claim", values)
        for key in ("name", "source", "origin"):
            if not isinstance(values.get(key), str):
                raise InputError(f"Expected {key} of a part of the claim to be a string.")
        if values["source"] not in (GIVEN, READ, DEFAULT):
            raise InputError(f"Expected source to be {GIVEN}, {READ} or {DEFAULT}, got another word.")
        texts = {key: values[key] for key in ("name", "source", "origin")}
        return cls(value=number(values, "value", high=LARGEST), **texts)


@dataclass(frozen=True)
class Hypothesis:
    """The claim about one observation: a curve, and how a bound on it converts to the claimed epsilon."""

    tradeoff: TradeOff
    parameter: float
    epsilon: Callable[[float], float]  # maps a bound on the parameter to an epsilon of the claim
    assumptions: tuple[str, ...] = ()
    condition: str | None = None  # what a refutation requires besides the data; None if implied by the claim


class Claimed(ABC):
    """The interface of a privacy claim; the only implementation is :class:`dpaudit.Claim`."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The claim in one line."""

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """The claimed epsilon at :attr:`delta`."""

    @property
    @abstractmethod
    def delta(self) -> float:
        """The claimed delta."""

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        """The numbers of the claim and where they come from; empty if the claim is not made of numbers."""
        return ()

    @abstractmethod
    def hypothesis(self, tradeoff: TradeOff | None) -> Hypothesis:
        """Return the claim in terms of ``tradeoff``, by default its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ErrorRatePlane:
    """A claimed curve, the curve of the bound, and the measured error rates with their region.

    ``region`` contains both true rates with the stated confidence if all observations are independent:
    it is the product of two Clopper-Pearson intervals, each with half of the error.
    """

    fpr: FloatArray
    claimed: FloatArray
    bound: FloatArray
    counts: ErrorCounts
    confidence: float
    region: tuple[tuple[float, float], tuple[float, float]]

    @classmethod
    def of(
        cls, counts: ErrorCounts, *, tradeoff: TradeOff, claimed: float, bound: float, confidence: float
    ) -> ErrorRatePlane:
        """Return the curves with the parameters ``claimed`` and ``bound``."""
        error = (1 - confidence) / 2
        region = (
            plausible_rate(counts.false_positives, counts.num_absent, error),
            plausible_rate(counts.false_negatives, counts.num_present, error),
        )
        # dense at both ends, where curves bend, and around the measured rates
        ends = np.sin(np.linspace(0, np.pi / 2, _POINTS)) ** 2
        near = np.linspace(max(region[0][0] - 0.1, 0.0), min(region[0][1] + 0.1, 1.0), _POINTS)
        fpr = np.union1d(ends, near)
        return cls(
            fpr=fpr,
            claimed=_curve(tradeoff, claimed, fpr),
            bound=_curve(tradeoff, bound, fpr),
            counts=counts,
            confidence=confidence,
            region=region,
        )


def _curve(tradeoff: TradeOff, parameter: float, fpr: FloatArray) -> FloatArray:
    return np.clip(np.nan_to_num(tradeoff.fnr(min(parameter, _LEAKIEST), fpr)), 0.0, 1.0)

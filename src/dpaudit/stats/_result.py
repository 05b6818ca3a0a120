"""The result of an audit: verdict, bound, tests, power and tested hypothesis."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from dpaudit._html import alone
from dpaudit._plotting import draw_tradeoff
from dpaudit._provenance import of_audit
from dpaudit.diagnostics import CheckResults, Diagnosis, Finding, holm, joint_causes
from dpaudit.errors import InputError, ViolationError
from dpaudit.stats._block import Block, details
from dpaudit.stats._bound import Bound, ClaimPart, Power, plain
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._estimate import Estimate
from dpaudit.stats._observations import Observations, observed_auc
from dpaudit.stats._one_run import GuessDesign
from dpaudit.stats._power import AuditDesign
from dpaudit.stats._roc_band import ErrorRatePlane
from dpaudit.stats.tradeoffs import TradeOff

_TWICE = 2.0  # the multiple of the claimed epsilon that an audit must be able to detect
PRIVACY, MECHANISM = "privacy", "mechanism"
OTHER_MECHANISM = "This is not the mechanism that the claim was computed for."


class Verdict(Enum):
    """The outcome of an audit; each value is the sentence that explains it."""

    VIOLATION = "This run leaks more than it claims."
    NO_VIOLATION = (
        "The claim is not refuted. This is no proof of privacy: a smaller leak could have gone unnoticed."
    )
    UNDERPOWERED = (
        "This audit cannot test the claim: it detects twice the claimed epsilon less than 80 % of the time."
    )


def verdict_sentence(verdict: Verdict, refuted: Collection[str], condition: str | None = None) -> str:
    """Return the sentence of a verdict that says what is refuted, and the condition for it, if any."""
    if verdict is not Verdict.VIOLATION:
        return str(verdict.value)
    if PRIVACY not in refuted:
        return (
            f"{OTHER_MECHANISM} The bound alone does not refute the claimed epsilon, but that epsilon says "
            "nothing about the mechanism that ran."
        )
    sentence = str(verdict.value) + (f" This holds if {condition}." if condition else "")
    return f"{sentence} {OTHER_MECHANISM}" if MECHANISM in refuted else sentence


def unrefuted(power: Power, epsilon: float, parameter: float) -> Verdict:
    """Return the verdict on a claim that is not refuted, given its epsilon and parameter."""
    is_enough = power.epsilon <= _TWICE * epsilon
    if math.isnan(power.epsilon) or math.isnan(epsilon):  # the accountant gave up
        is_enough = power.parameter <= _TWICE * parameter
    return Verdict.NO_VIOLATION if is_enough and math.isfinite(power.parameter) else Verdict.UNDERPOWERED


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """Claim, bound, tests, verdict and power of one audit.

    ``diagnosis`` has the tests of the same run, None if there is nothing to test. Bound and tests share one
    error rate and give one verdict; :attr:`refuted` says what it rests on. ``bound_p_value`` maps a claimed
    parameter to the p-value of the bound. ``is_blind`` states that too many trials failed to detect any leak.
    ``not_covered`` lists, in
    sentences, what the audit did not exercise; ``specific`` are those of them that hold for this run, not for
    every run of its kind. ``notes`` are sentences on scores that do not look as they
    were described. ``observations`` are the scores, from which :attr:`estimate` is computed, unless
    ``no_estimate`` is a sentence that says why it would not hold. ``clues`` are further keywords for
    :func:`dpaudit.diagnostics.likely_causes`. ``times`` are when a recorder was created and when audited.
    """

    claim: Claimed
    bound: Bound
    hypothesis: Hypothesis
    design: AuditDesign | GuessDesign
    bound_p_value: Callable[[float], float] | None = field(default=None, repr=False, compare=False)
    is_blind: bool = False
    not_covered: tuple[str, ...] = ()
    specific: tuple[str, ...] = ()
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

    @cached_property
    def verdict(self) -> Verdict:
        """A violation if bound or tests refute the claim; underpowered if twice its epsilon could be missed.

        The second depends on the design of the audit alone, never on its scores.
        """
        if self.refuted:
            return Verdict.VIOLATION
        return unrefuted(self.power, self.claim.epsilon, self.hypothesis.parameter)

    @cached_property
    def p_value(self) -> float:
        """The smallest error rate at which the claim is refuted: a violation has at most 1 - confidence.

        Bound and tests each have their share of that rate, by which their p-values are divided. For bets
        it is one over their largest wealth. It is 0 if the claim is refuted by a finding without an error
        rate, and 1 if not even half is enough. Not resolved below 1e-12 for counts. Computed lazily.
        """
        level = 1 - self.confidence
        smallest = min(1.0, self._bound_p_value * level / (1 - self.bound.confidence))
        if self.diagnosis is not None and (self.diagnosis.checks or self.findings):
            tested = {check.name for check in self.diagnosis.checks}
            if any(finding.name not in tested for finding in self.findings):
                return 0.0
            adjusted = holm([check.p_value for check in self.diagnosis.checks]).min(initial=1.0)
            smallest = min(smallest, adjusted * level / (1 - self.diagnosis.confidence))
        smallest = max(smallest, sys.float_info.min)  # only facts have 0
        # roots are found with a tolerance, which must not contradict the verdict
        return min(smallest, level) if self.refuted else max(smallest, math.nextafter(level, 1.0))

    @property
    def _bound_p_value(self) -> float:
        """The p-value of the bound alone; its error rate or 1 if a method of the user has none."""
        if self.bound_p_value is not None:
            return self.bound_p_value(self.hypothesis.parameter)
        return 1 - self.bound.confidence if PRIVACY in self.refuted else 1.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the tests, most certain first."""
        return () if self.diagnosis is None else self.diagnosis.findings

    @property
    def to_check(self) -> tuple[Finding, ...]:
        """Facts that a correct run may have, with a call that decides them; no verdict rests on them."""
        return () if self.diagnosis is None else self.diagnosis.to_check

    @property
    def refuted(self) -> tuple[str, ...]:
        """What is refuted: the claimed "privacy", that this is the claimed "mechanism", or both.

        The bound refutes the first; the tests refute the second, after which the claimed epsilon says nothing
        about this run.
        """
        is_above = self.bound.parameter > self.hypothesis.parameter
        privacy = (PRIVACY,) if is_above or self.bound.epsilon > self.claim.refuted_epsilon else ()
        return (*privacy, MECHANISM) if self.findings else privacy

    @property
    def confidence(self) -> float:
        """The joint confidence of bound and tests: at most 1 - confidence of all correct runs are flagged."""
        tests = 0.0 if self.diagnosis is None else 1 - self.diagnosis.confidence
        return round(self.bound.confidence - tests, 12)

    def likely_causes(self) -> tuple[str, ...]:
        """Return likely causes of a violation, best first: hints for a developer, not proof."""
        return joint_causes(self.diagnosis, self.clues) if self.refuted else ()

    @cached_property
    def power(self) -> Power:
        """The smallest leak that this audit would have detected with 80 % probability; computed lazily."""
        design = self.design
        leak = math.inf if self.is_blind else design.smallest_leak(self.hypothesis.parameter)
        return Power.of(leak, self.hypothesis, 0.8, design.lengths, is_ideal=not design.normalized)

    @cached_property
    def attack_power(self) -> Power | None:
        """The same for an attack as good as this one, estimated from its own scores; computed lazily.

        None if the scores are normalized, as those of white-box canaries are, or the claim is refuted.
        """
        if self.design.normalized or self.observations is None or self.refuted:
            return None
        claimed, design = self.hypothesis.parameter, self.design
        efficiency = design.efficiency(claimed, observed_auc(self.observations))
        leak = math.inf if self.is_blind else design.weakened(efficiency).smallest_leak(claimed)
        return Power.of(leak, self.hypothesis, 0.8, efficiency=efficiency)

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

    @cached_property
    def needed(self) -> dict[str, Any] | None:
        """What an underpowered audit lacks, in a sentence and in numbers; None for any other verdict."""
        if self.verdict is not Verdict.UNDERPOWERED:
            return None
        if self.is_blind:
            return {"sentence": "Fewer failed trials: too many failed to detect any leak."}
        if isinstance(self.design, GuessDesign):
            return {"sentence": "More canaries in the run would detect smaller leaks."}
        option = " --end-to-end" if hasattr(self.hypothesis.tradeoff, "sample_rate") else ""
        return {"sentence": f"More scores: `dpaudit plan{option}` computes how many."}

    @property
    def _size(self) -> dict[str, int]:
        if self.observations is None:
            return {}
        present, absent = self.observations.with_canary, self.observations.without_canary
        size = {"num_present": int(present.size), "num_absent": int(absent.size)}
        if self.observations.is_stepped:
            num_steps = self.observations.num_steps
            size |= {"num_steps": num_steps, "scores_per_step": (present.size + absent.size) // num_steps}
        return size

    @property
    def sentence(self) -> str:
        """The verdict's sentence: what is refuted, and the condition under which it is, if any."""
        return verdict_sentence(self.verdict, self.refuted, self.hypothesis.condition)

    @property
    def is_violation(self) -> bool:
        """Whether the claim is refuted, by the bound or by the tests."""
        return bool(self.refuted)

    def __bool__(self) -> bool:
        raise TypeError(
            "A result is neither true nor false: use result.is_violation, result.verdict or "
            "result.raise_for_violation()."
        )

    def raise_for_violation(self, *, underpowered: str = "pass") -> None:
        """Raise an error whose message is the printed result if the claim is refuted.

        Args:
            underpowered: "raise" to also raise if the audit cannot test the claim, or "pass".

        Raises:
            dpaudit.ViolationError: The claim is refuted, or cannot be tested.

        """
        if underpowered not in ("raise", "pass"):
            raise InputError(f'underpowered must be "raise" or "pass", got {underpowered!r}.')
        if self.is_violation or (underpowered == "raise" and self.verdict is Verdict.UNDERPOWERED):
            raise ViolationError(str(self))

    @property
    def block(self) -> Block:
        """The few facts that every form of a result shows first."""
        return Block.of(self._shown_first())

    def __str__(self) -> str:
        return str(self.block)

    def __repr__(self) -> str:
        block = self.block
        return f"<Result {block.title}: {block.numbers}>"

    def details(self) -> str:
        """Return all that the audit knows, one labeled line per fact: what :func:`print` leaves out, too."""
        rows = details(self._shown_first(), self.power, self.attack_power, self.estimate)
        return "\n".join(
            [f"{self.verdict.name}. {self.sentence}", *(f"  {row[0]}: {row[1]}" for row in rows)]
        )

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks display."""
        return alone(self.block.html())

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the claimed curve, the curve of the bound, and the measured error rates with their region.

        Requires matplotlib. Return the axes: ``ax`` if given, otherwise new ones.
        """
        counts = self.bound.counts
        if not isinstance(counts, ErrorCounts):
            raise InputError(f"Only a bound on error rates can be plotted; this one is on {counts!r}.")
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
        values = self._shown_first() | {"estimate": self.estimate.to_dict()}
        return values if self.provenance is None else values | {"provenance": self.provenance}

    def _shown_first(self) -> dict[str, Any]:
        """Return the plain values that the block shows, without those that take longer."""
        return {
            "verdict": self.verdict.name,
            "refuted": list(self.refuted),
            "sentence": self.sentence,
            "p_value": self.p_value,
            "confidence": self.confidence,
            "condition": self.hypothesis.condition,
            "size": self._size,
            "needed": self.needed,
            "claim": {
                "summary": self.claim.summary,
                "description": self.claim.description,
                "epsilon": plain(self.claim.epsilon),
                "delta": self.claim.delta,
                "parameter": plain(self.hypothesis.parameter),
                "parts": [number.to_dict() for number in self.claim.parts],
            },
            "bound": self.bound.to_dict(),
            "power": self.power.to_dict(),
            **({} if self.attack_power is None else {"attack_power": self.attack_power.to_dict()}),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_dict(),
            "scores_of": None if self.observations is None else self.observations.scores_of,
            "likely_causes": list(self.likely_causes()),
            "not_covered": list(self.not_covered),
            "specific": list(self.specific),
            "notes": list(self.notes),
        }


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
    def description(self) -> str:
        """The claim without its epsilon and delta."""
        return self.summary.rpartition(": epsilon")[0] or self.summary

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """The claimed epsilon at :attr:`delta`."""

    @property
    @abstractmethod
    def delta(self) -> float:
        """The claimed delta."""

    @property
    def facts(self) -> CheckResults:
        """What is known of the claim without observations."""
        return CheckResults()

    @property
    def refuted_epsilon(self) -> float:
        """The epsilon that was claimed of the parameters, if it is too small for them, otherwise infinity."""
        return math.inf

    def diagnosed(self, diagnosis: Diagnosis | None = None) -> Diagnosis | None:
        """Return the diagnosis with the facts about the claim, which have no part in its error rate."""
        if self.facts == CheckResults():
            return diagnosis
        return (diagnosis or Diagnosis.of((), confidence=1.0)).joined(self.facts)

    @property
    def parts(self) -> tuple[ClaimPart, ...]:
        """The numbers of the claim and where they come from; empty if the claim is not made of numbers."""
        return ()

    @abstractmethod
    def curve_of_scores(self, scores_of: str | None, tradeoff: TradeOff | None) -> TradeOff | None:
        """Return the curve of one score: ``tradeoff`` if it fits what a score is of; None for the claim's."""

    @abstractmethod
    def hypothesis(self, tradeoff: TradeOff | None) -> Hypothesis:
        """Return the claim in terms of ``tradeoff``, by default its own."""

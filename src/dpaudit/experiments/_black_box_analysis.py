"""Bounds, verdict and power of black-box audits, from the scores of many training runs or of one.

A run uses them at its end, and ``_run_analysis`` when it is checked. Needs neither torch nor pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.methods import MethodComparison, examine
from dpaudit.stats import (
    ApproximateDP,
    AuditDesign,
    Bound,
    GuessDesign,
    Guesses,
    HeldOut,
    Observations,
    Power,
    Result,
    Simultaneous,
    ThresholdRule,
    TradeOff,
    Verdict,
    audit_recorded,
    default_method,
    guessed_p_value,
    lower_bound,
    one_run_bound,
    one_run_fdp_bound,
    plain,
    unrefuted,
)
from dpaudit.stats.inference import BoundQuery

THRESHOLD_RULES: Final[Mapping[str, ThresholdRule]] = {"simultaneous": Simultaneous(), "held-out": HeldOut()}
"""The values of ``audit.threshold``."""


def claim_values(summary: str, epsilon: float, delta: float, parameter: float) -> dict[str, Any]:
    """Return the plain values of a claim with this parameter of its curve."""
    return {"summary": summary, "epsilon": plain(epsilon), "delta": delta, "parameter": plain(parameter)}


def no_claim(delta: float) -> dict[str, Any]:
    """Return the values of the claim of a run without noise, which claims nothing."""
    text = f"clipping without noise: no privacy, epsilon = inf at delta = {delta:g}"
    return claim_values(text, math.inf, delta, math.inf)


@dataclass(frozen=True, kw_only=True)
class ManyRunsAnalysis:
    """Bounds, verdict and power from one score per training run.

    A score is an observation of a whole training run, so its trade-off curve is composed over all steps.
    Without noise there is no such curve and no claim, and the bound is for (epsilon, delta)-DP.
    """

    claim: Claim | None
    delta: float
    confidence: float
    threshold: str | None = None
    """The name of the threshold rule; None if the number of scores determines it. All choices are sound."""
    methods: Collection[str] | None = None
    """The methods whose bounds are reported; None means all."""

    @cached_property
    def _curve(self) -> TradeOff:
        if self.claim is None:
            return ApproximateDP(self.delta)
        assert self.claim.training is not None  # of a claim about DP-SGD
        return self.claim.training

    @property
    def _rule(self) -> ThresholdRule | None:
        return None if self.threshold is None else THRESHOLD_RULES[self.threshold]

    def bound(self, observations: Observations) -> Bound:
        """Return the bound on which the verdict is based."""
        inference, rule = default_method(observations, self._curve, None, self._rule)
        return lower_bound(
            observations,
            delta=self.delta,
            confidence=self.confidence,
            tradeoff=self._curve,
            inference=inference,
            threshold=rule,
        )

    def compare(self, observations: Observations, flawless: Observations | None = None) -> MethodComparison:
        """Return the bounds of all methods, and the verdict if there is a claim.

        ``flawless`` are the scores of an attack that errs only on failed trials, if there are any: the audit
        is blind if not even these could have refuted the claim.
        """
        result: Result | None = None
        if self.claim is not None:
            result = audit_recorded(
                observations,
                claim=self.claim,
                confidence=self.confidence,
                tradeoff=self._curve,
                threshold=self._rule,
            )
            if flawless is not None and not result.refuted:
                is_blind = self.bound(flawless).parameter <= result.hypothesis.parameter
                result = replace(result, is_blind=is_blind)
        return examine(
            observations,
            delta=self.delta,
            confidence=self.confidence,
            claim=self.claim,
            tradeoff=None if self.claim is None else self._curve,
            names=self.methods,
            result=result,
        )

    def largest(self, observations: Observations, failed: Collection[int] = ()) -> float:
        """Return the epsilon that the same method would report for an attack without errors.

        Failed trials count as errors.
        """
        if failed:
            return self.bound(_flawless(observations, failed)).epsilon
        inference, rule = default_method(observations, self._curve, None, self._rule)
        query = BoundQuery(self._curve, self.delta, 1 - self.confidence)
        perfect = AuditDesign.of(observations, inference, rule, query).max_refutable()
        return self._curve.epsilon(perfect, self.delta)

    def values(self, observations: Observations, failed: Collection[int] = ()) -> dict[str, Any]:
        """Return the result as plain values; ``failed`` lists the numbers of the trials without a score."""
        comparison = self.compare(observations, _flawless(observations, failed) if failed else None)
        note, result = "", comparison.result
        if result is None:
            note = (
                "Without noise nothing is claimed and nothing can be refuted: the bound is a lower bound on "
                "the privacy loss."
            )
        elif result.is_blind:
            note = (
                "Too many trials failed: even an attack without a single error on the others could not have "
                "refuted the claim."
            )
        elif failed and not result.refuted:
            note = "The stated power assumes that no trial fails."
        if result is not None:  # each score is of a whole training run, made here
            comparison = replace(comparison, result=replace(result, not_covered=()))
        values = comparison.to_dict()
        if self.claim is None:
            values |= {"claim": no_claim(self.delta), "bound": self.bound(observations).to_dict()}
        values["notes"] += [note] if note else []
        return {**values, "largest_epsilon": plain(self.largest(observations, failed))}


def _flawless(observations: Observations, failed: Collection[int]) -> Observations:
    """Return the scores of an attack that errs only on failed trials; odd trials have the canary."""
    present, absent = np.ones(observations.with_canary.size), np.zeros(observations.without_canary.size)
    for number in failed:
        side, worst = (present, -1.0) if number % 2 else (absent, 2.0)
        side[number // 2] = worst
    return Observations(with_canary=present, without_canary=absent)


@dataclass(frozen=True, kw_only=True)
class OneRunAnalysis:
    """Two bounds that are valid for canaries in the same training run, and a verdict based on the first.

    It assumes the trade-off curve of the claimed training (Mahloujifar et al. 2024); the second makes no
    assumption about the mechanism (Steinke et al. 2023).
    """

    noise_multiplier: float
    curve: SubsampledGaussian
    delta: float
    confidence: float

    @cached_property
    def _claim(self) -> Claim:
        return Claim.dpsgd(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.curve.sample_rate,
            num_steps=self.curve.num_steps,
            delta=self.delta,
        )

    @property
    def claimed(self) -> float:
        """The claimed parameter of the curve."""
        return 1 / self.noise_multiplier

    def bound(self, guesses: Guesses) -> Bound:
        """Return the bound on which the verdict is based."""
        return one_run_fdp_bound(guesses, tradeoff=self.curve, delta=self.delta, confidence=self.confidence)

    def recomputable(self, guesses: Guesses) -> dict[str, Any]:
        """Return claim, p-value and the bounds of both methods, which follow from the guesses alone."""
        universal = one_run_bound(guesses, delta=self.delta, confidence=self.confidence)
        rows = {"f-DP(one-run)": self.bound(guesses), "(eps,delta)(one-run)": universal}
        return {
            "p_value": guessed_p_value(guesses, self.curve, self.claimed),
            "claim": claim_values(self._claim.summary, self._claim.epsilon, self.delta, self.claimed),
            "methods": [
                {"name": name, **row.to_dict(), "training_epsilon": None} for name, row in rows.items()
            ],
        }

    def values(self, guesses: Guesses) -> dict[str, Any]:
        """Return the result as plain values."""
        bound, power = self.bound(guesses), self._power(guesses)
        verdict, attack = Verdict.VIOLATION, {}
        if bound.parameter <= self.claimed:
            verdict = unrefuted(power, self._claim.epsilon, self.claimed)
            efficiency = self._design(guesses).efficiency(self.claimed)
            attack = {"attack_power": self._power(guesses, efficiency).to_dict()}
        return {
            "verdict": verdict.name,
            "sentence": verdict.value,
            **self.recomputable(guesses),
            "bound": bound.to_dict(),
            "power": power.to_dict(),
            **attack,
            "not_covered": [],
            "delta": self.delta,
            "confidence": self.confidence,
            "notes": [],
        }

    def _power(self, guesses: Guesses, efficiency: float | None = None) -> Power:
        """Return the power of guesses by log-likelihood ratios, or by a share of their signal."""
        design, probability = self._design(guesses), 0.8  # of detection, at which the power is stated
        if efficiency is not None:
            design = design.weakened(efficiency)
        leak = design.smallest_leak(self.claimed, probability)
        hypothesis, is_ideal = self._claim.hypothesis(self.curve), efficiency is None
        return Power.of(leak, hypothesis, probability, is_ideal=is_ideal, efficiency=efficiency)

    def _design(self, guesses: Guesses) -> GuessDesign:
        return GuessDesign(guesses, self.curve, self.delta, 1 - self.confidence)

"""Bounds, verdict and power of a black-box audit from the scores of many training runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments._run_analysis import THRESHOLD_RULES, no_claim
from dpaudit.experiments.config import Config, ManyRunsConfig
from dpaudit.methods import examine
from dpaudit.stats import (
    ApproximateDP,
    AuditDesign,
    Bound,
    Observations,
    Result,
    ThresholdRule,
    TradeOff,
    audit_recorded,
    default_method,
    lower_bound,
    plain,
)
from dpaudit.stats.inference import BoundQuery

_NOTHING_CLAIMED = (
    "Without noise nothing is claimed and nothing can be refuted: the bound is a lower bound on the privacy "
    "loss."
)
_TOO_MANY_FAILED = (
    "Too many trials failed: even an attack without a single error on the others could not have refuted the "
    "claim."
)
_POWER_WITHOUT_FAILURES = "The stated power assumes that no trial fails."


class ManyRunsAnalysis:
    """Bounds, verdict and power from one score per training run.

    A score is an observation of a whole training run, so its trade-off curve is composed over all steps.
    Without noise there is no such curve, and the bound is for (epsilon, delta)-DP.
    """

    def __init__(self, config: Config, resolved: Resolved) -> None:
        assert isinstance(config.audit, ManyRunsConfig)
        self._audit, self.delta = config.audit, config.training.delta
        self.confidence = config.audit.confidence
        self._claim: Claim | None = None
        self._curve: TradeOff = ApproximateDP(self.delta)
        if resolved.noise_multiplier > 0:
            self._curve = SubsampledGaussian(resolved.sample_rate, config.training.num_steps)
            self._claim = Claim.dpsgd(
                noise_multiplier=resolved.noise_multiplier,
                sample_rate=resolved.sample_rate,
                num_steps=config.training.num_steps,
                delta=self.delta,
            )

    @property
    def claimed_epsilon(self) -> float | None:
        """The epsilon of the claim; None if nothing is claimed."""
        return None if self._claim is None else self._claim.epsilon

    @property
    def rule(self) -> ThresholdRule | None:
        """The threshold rule; None if the number of scores determines it. All choices are sound."""
        return None if self._audit.threshold is None else THRESHOLD_RULES[self._audit.threshold]

    def bound(self, observations: Observations) -> Bound:
        """Return the bound on which the verdict is based."""
        inference, rule = default_method(observations, self._curve, None, self.rule)
        return lower_bound(
            observations,
            delta=self.delta,
            confidence=self.confidence,
            tradeoff=self._curve,
            inference=inference,
            threshold=rule,
        )

    def largest(self, observations: Observations, failed: Collection[int] = ()) -> float:
        """Return the epsilon that the same method would report for an attack without errors.

        Failed trials count as errors.
        """
        if failed:
            return self.bound(_without_errors(observations, failed)).epsilon
        inference, rule = default_method(observations, self._curve, None, self.rule)
        query = BoundQuery(self._curve, self.delta, 1 - self.confidence)
        perfect = AuditDesign.of(observations, inference, rule, query).max_refutable()
        return self._curve.epsilon(perfect, self.delta)

    def values(self, observations: Observations, failed: Collection[int] = ()) -> dict[str, Any]:
        """Return the result as plain values; ``failed`` lists the numbers of the trials without a score."""
        result, notes = self._result(observations, failed)
        found = examine(
            observations,
            delta=self.delta,
            confidence=self.confidence,
            claim=self._claim,
            tradeoff=None if self._claim is None else self._curve,
            names=self._audit.methods,
            result=result,
        ).to_dict()
        if self._claim is None:
            found |= {"claim": no_claim(self.delta), "bound": self.bound(observations).to_dict()}
        largest = {"largest_epsilon": plain(self.largest(observations, failed))}
        return {**found, "notes": [*found["notes"], *notes], **largest}

    def _result(self, observations: Observations, failed: Collection[int]) -> tuple[Result | None, list[str]]:
        if self._claim is None:
            return None, [_NOTHING_CLAIMED]
        result = audit_recorded(
            observations,
            claim=self._claim,
            confidence=self.confidence,
            tradeoff=self._curve,
            threshold=self.rule,
        )
        result = replace(result, not_covered=())  # each score is of a whole training run, made here
        if not failed or result.refuted:
            return result, []
        best = self.bound(_without_errors(observations, failed))
        if best.parameter > result.hypothesis.parameter:
            return result, [_POWER_WITHOUT_FAILURES]
        return replace(result, is_blind=True), [_TOO_MANY_FAILED]


def _without_errors(observations: Observations, failed: Collection[int]) -> Observations:
    """Return the scores of an attack that errs only on failed trials; odd trials have the canary."""
    present, absent = np.ones(observations.with_canary.size), np.zeros(observations.without_canary.size)
    for number in failed:
        side, worst = (present, -1.0) if number % 2 else (absent, 2.0)
        side[number // 2] = worst
    return Observations(with_canary=present, without_canary=absent)

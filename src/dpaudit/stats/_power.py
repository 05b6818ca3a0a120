"""The power of an audit: which leaks its size and method could have detected."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from dpaudit._types import FloatArray
from dpaudit.stats._binomial import binomial_pmf, plausible_rate
from dpaudit.stats._counts import ErrorCounts, StepErrors
from dpaudit.stats._observations import Observations
from dpaudit.stats._rootfinding import last_positive
from dpaudit.stats.inference import Betting, BoundQuery, ExactInference, Inference
from dpaudit.stats.inference._wealth import MAX_LOSS
from dpaudit.stats.thresholds import ThresholdRule

_IMPLAUSIBLE = 1e-3  # the error of the interval of plausible false positive rates


@dataclass(frozen=True)
class AuditDesign:
    """The method of an audit, and the number of scores that its threshold rule counts."""

    inference: Inference
    rule: ThresholdRule
    query: BoundQuery
    num_absent: int
    num_present: int
    num_steps: int
    normalized: bool = True

    @classmethod
    def of(
        cls, observations: Observations, inference: Inference, rule: ThresholdRule, query: BoundQuery
    ) -> AuditDesign:
        """Return the design of an audit of ``observations``."""
        return cls.sized(
            num_absent=observations.without_canary.size,
            num_present=observations.with_canary.size,
            num_steps=observations.num_steps if observations.is_stepped else None,
            inference=inference,
            rule=rule,
            query=query,
            normalized=observations.normalized,
        )

    @classmethod
    def sized(
        cls,
        *,
        num_absent: int,
        num_present: int,
        num_steps: int | None,
        inference: Inference,
        rule: ThresholdRule,
        query: BoundQuery,
        normalized: bool = True,
    ) -> AuditDesign:
        """Return a design from the sizes before any hold-out; pass ``num_steps`` if canaries share steps."""
        left = replace(query, error_rate=rule.error(query.error_rate, num_absent))
        if num_steps is None:
            absent, present = rule.counted(num_absent), rule.counted(num_present)
            return cls(inference, rule, left, absent, present, min(absent, present), normalized)
        steps = rule.counted(num_steps)
        absent, present = (max(size * steps // num_steps, 1) for size in (num_absent, num_present))
        return cls(inference, rule, left, absent, present, steps, normalized)

    def max_refutable(self) -> float:
        """Return the largest parameter that an attack without a single error would refute."""
        if isinstance(self.inference, ExactInference):
            counts = ErrorCounts.perfect(self.num_absent, self.num_present)
            return self.rule.largest_bound(self.inference, counts, self.query)
        assert isinstance(self.inference, Betting)
        none = np.zeros(self.num_steps, dtype=np.int64)
        sizes = [np.full(self.num_steps, self._per_step(n)) for n in (self.num_absent, self.num_present)]
        errors = StepErrors(none, sizes[0], none, sizes[1], by_coin=False)
        return self.inference.from_errors(errors, self.query)

    def power(self, claimed: float, actual: float) -> float:
        """Return the probability of refuting ``claimed`` when the mechanism has parameter ``actual``.

        The attack is ideal: it attains the mechanism's curve at the operating point of the threshold rule.
        """
        fpr, fnr = self.rule.operating_point(self.query, actual, self.normalized)
        if isinstance(self.inference, ExactInference):
            sizes = ErrorCounts.perfect(self.num_absent, self.num_present)
            expected = round(fpr * self.num_absent)
            plausible = plausible_rate(expected, self.num_absent, _IMPLAUSIBLE)
            region = self.inference.refuting_region(claimed, sizes, plausible, self.query)
            return min(region.probability(fpr, fnr), 1.0)
        return self._betting_power(claimed, fpr, fnr)

    def smallest_leak(self, claimed: float, probability: float = 0.8) -> float:
        """Return the smallest parameter above ``claimed`` that would be detected with this probability."""
        target = float(special.ndtri(probability))

        def missing(excess: float) -> float:
            power = min(max(self.power(claimed, claimed + excess), 1e-300), 1 - 1e-16)
            return target - float(special.ndtri(power))

        return claimed + last_positive(missing, max(0.1 * claimed, 1e-6), tolerance=1e-2)

    def _per_step(self, size: int) -> int:
        return max(size // self.num_steps, 1)

    def _betting_power(self, claimed: float, fpr: float, fnr: float) -> float:
        """Return the probability that the log of the wealth, a random walk with drift, reaches its target.

        This is for a constant stake. The actual stake, which adapts to the wealth, does slightly better (in
        simulations by up to 0.05 with one score per step, and not at all where the stake is at its limit).
        """
        allowed = self.query.tradeoff.balanced_error(claimed)
        shares, weights = self._step_shares(fpr, fnr)
        mean = float(weights @ shares)
        variance = float(weights @ (shares - mean) ** 2)
        assert isinstance(self.inference, Betting)
        horizon = self.inference.horizon or self.num_steps
        target = math.log(1 / self.query.error_rate)
        bet = math.sqrt(2 * target / (variance * horizon)) if variance > 0 else math.inf
        growth = np.log1p(min(bet, MAX_LOSS / (1 - allowed)) * (allowed - shares))
        drift = float(weights @ growth)
        spread = math.sqrt(max(float(weights @ (growth - drift) ** 2), 1e-24))
        return _hitting_probability(math.log(1 / self.query.error_rate), drift, spread, self.num_steps)

    def _step_shares(self, fpr: float, fnr: float) -> tuple[FloatArray, FloatArray]:
        """Return the possible values of the balanced error of one step, and their probabilities."""
        absent, absent_weights = _binomial_or_normal(self._per_step(self.num_absent), fpr)
        present, present_weights = _binomial_or_normal(self._per_step(self.num_present), fnr)
        shares = (absent[:, None] + present[None, :]) / 2
        return shares.reshape(-1), np.outer(absent_weights, present_weights).reshape(-1)


def _hitting_probability(target: float, drift: float, spread: float, num_steps: int) -> float:
    """Return the probability that a random walk reaches ``target`` at some step.

    It is that of Brownian motion, by the reflection principle; with discrete steps, the target is effectively
    0.5826 standard deviations of a step higher (Siegmund 1979).
    """
    target += 0.5826 * spread
    end, total = drift * num_steps, spread * math.sqrt(num_steps)
    at_the_end = float(special.ndtr((end - target) / total))
    logarithm = 2 * drift * target / spread**2 + float(special.log_ndtr((-target - end) / total))
    return min(at_the_end + math.exp(min(logarithm, 0.0)), 1.0)


def _binomial_or_normal(trials: int, rate: float) -> tuple[FloatArray, FloatArray]:
    """Return error rates of one side with weights: all values if errors are few, else normal nodes."""
    if trials * rate * (1 - rate) < 25:
        first, weights = binomial_pmf(trials, rate)
        return (first + np.arange(weights.size)) / trials, weights
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    values = rate + nodes * math.sqrt(rate * (1 - rate) / trials)
    return np.clip(values, 0.0, 1.0), weights / weights.sum()

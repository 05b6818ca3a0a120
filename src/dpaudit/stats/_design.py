"""How many observations an audit rests on, and what it could find with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Question
from dpaudit.stats._search import last_true
from dpaudit.stats._steps import StepErrors
from dpaudit.stats._types import FloatArray
from dpaudit.stats.inference import Betting, ExactInference, Inference
from dpaudit.stats.inference._betting import MOST, stake
from dpaudit.stats.thresholds import ThresholdRule

__all__ = ["Design"]


@dataclass(frozen=True)
class Design:
    """The sizes of an audit, after its threshold rule has taken its part, with its method."""

    inference: Inference
    rule: ThresholdRule
    question: Question
    num_absent: int
    num_present: int
    num_steps: int

    @classmethod
    def of(
        cls,
        observations: Observations,
        inference: Inference,
        rule: ThresholdRule,
        question: Question,
    ) -> Design:
        """The design behind ``observations``."""
        return cls.sized(
            num_absent=observations.without_canary.size,
            num_present=observations.with_canary.size,
            num_steps=observations.num_steps,
            inference=inference,
            rule=rule,
            question=question,
        )

    @classmethod
    def sized(
        cls,
        *,
        num_absent: int,
        num_present: int,
        num_steps: int,
        inference: Inference,
        rule: ThresholdRule,
        question: Question,
    ) -> Design:
        """A design of these sizes before the rule has taken its part."""
        absent, present = rule.counted(num_absent, num_present)
        steps = max(num_steps * absent // num_absent, 1)
        left = replace(question, error=rule.error(question.error))
        return cls(inference, rule, left, absent, present, steps)

    def perfect(self) -> float:
        """The parameter that an attack without a single error would refute."""
        if isinstance(self.inference, ExactInference):
            counts = ErrorCounts.perfect(self.num_absent, self.num_present)
            return self.inference.parameter(counts, self.question)
        assert isinstance(self.inference, Betting)
        none = np.zeros(self.num_steps, dtype=np.int64)
        sizes = [np.full(self.num_steps, self._a_step(n)) for n in (self.num_absent, self.num_present)]
        errors = StepErrors(none, sizes[0], none, sizes[1], by_coin=False)
        return self.inference.from_errors(errors, self.question)

    def power(self, claimed: float, actual: float) -> float:
        """The probability of refuting ``claimed`` when the mechanism has parameter ``actual``.

        For an ideal attack, one that reaches the mechanism's own curve at the rule's operating point.
        """
        fpr = self.rule.operating_fpr(self.question, actual)
        fnr = float(self.question.tradeoff.fnr(actual, np.asarray(fpr)))
        if isinstance(self.inference, ExactInference):
            sizes = ErrorCounts.perfect(self.num_absent, self.num_present)
            near = (fpr, self.rule.operating_fpr(self.question, claimed))
            interval = self._around(min(near)), self._around(max(near), above=True)
            region = self.inference.refuting_region(claimed, sizes, interval, self.question)
            return min(region.probability(fpr, fnr), 1.0)
        return self._betting_power(claimed, fpr, fnr)

    def smallest_leak(self, claimed: float, probability: float = 0.8) -> float:
        """The smallest parameter above ``claimed`` that would be flagged with this probability."""
        start = max(claimed, 1e-6)
        return max(
            claimed,
            last_true(lambda p: self.power(claimed, p) < probability, 1.1 * start, tolerance=1e-3),
        )

    def _a_step(self, size: int) -> int:
        return max(size // self.num_steps, 1)

    def _around(self, fpr: float, above: bool = False) -> float:
        """The end of what an audit near ``fpr`` would hold for plausible."""
        reach = 3.3 * math.sqrt(fpr * (1 - fpr) / self.num_absent) + 3.3 / self.num_absent
        return min(fpr + reach, 1.0) if above else max(fpr - reach, 0.0)

    def _betting_power(self, claimed: float, fpr: float, fnr: float) -> float:
        """The wealth at the end is nearly log-normal: its mean and variance a step, summed."""
        allowed = self.question.tradeoff.balanced_error(claimed)
        shares, weights = self._step_shares(fpr, fnr)
        mean = float(weights @ shares)
        variance = float(weights @ (shares - mean) ** 2)
        bet = stake(np.asarray(max(variance, 1e-12)), self.question.error, self.num_steps)
        growth = np.log1p(min(float(bet), MOST / (1 - allowed)) * (allowed - shares))
        rate = float(weights @ growth)
        spread = math.sqrt(float(weights @ (growth - rate) ** 2) * self.num_steps)
        excess = self.num_steps * rate - math.log(1 / self.question.error)
        return float(special.ndtr(excess / max(spread, 1e-12)))

    def _step_shares(self, fpr: float, fnr: float) -> tuple[FloatArray, FloatArray]:
        """The balanced error of one step: its values and their probabilities."""
        values, weights = zip(
            *(
                _binomial_or_normal(self._a_step(n), p)
                for n, p in ((self.num_absent, fpr), (self.num_present, fnr))
            ),
            strict=True,
        )
        shares = (values[0][:, None] + values[1][None, :]) / 2
        return shares.reshape(-1), np.outer(weights[0], weights[1]).reshape(-1)


def _binomial_or_normal(trials: int, rate: float) -> tuple[FloatArray, FloatArray]:
    """The share of errors of one side: every value for few trials, a normal's nodes for many."""
    if trials <= 32:
        counts = np.arange(trials + 1)
        return counts / trials, special.comb(trials, counts) * rate**counts * (1 - rate) ** (trials - counts)
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    values = rate + nodes * math.sqrt(rate * (1 - rate) / trials)
    return np.clip(values, 0.0, 1.0), weights / weights.sum()

"""The power of an audit: which leaks its size and method could have detected.

The power of exact inferences is computed. That of bets is simulated: the bound is below the mean advantage of
its run by a distance that varies little and hardly depends on that mean, whose distribution is known. So few
runs suffice, and one simulation serves for leaks of similar sizes. Counting detected runs instead, as for few
steps, finds the same leaks in 3 to 11 times the time: in 5.5 instead of 0.6 seconds for 2,000 steps of 64
canaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from scipy import special, stats

from dpaudit._types import FloatArray
from dpaudit.stats._counts import ErrorCounts, StepErrors
from dpaudit.stats._observations import Observations
from dpaudit.stats.inference import (
    AdvantageBets,
    Betting,
    BoundQuery,
    ClopperPearson,
    ExactInference,
    Inference,
    JointExact,
    Region,
    StepBets,
    plausible_rate,
)
from dpaudit.stats.rootfinding import last_positive, last_true
from dpaudit.stats.thresholds import BestOf, HeldOut, Predictable, ThresholdRule
from dpaudit.stats.thresholds._chosen import step_rates
from dpaudit.stats.tradeoffs import Attack, signal_share

# Ends of intervals of rates are on a lattice of the logit, so that calls share regions: this many per unit,
# and more for many scores, whose plausible rates are close together.
_LOGITS, _ROOT_PER_LOGIT = 2, 64
# Below this number of steps, the distance of a bound from the mean of its run depends on that mean: margins
# of one leak are wrong for another by up to 80 points of power. Detected runs are counted instead.
_SHORT = 30
_SHORT_RUNS = 400  # a standard error of 2 points
_RUNS = 240, 400  # fewest and most simulated runs of longer ones; a standard error of 2 to 3 points
_MOST_SIMULATED = 300_000  # steps of all runs
_LEAKIEST = 1e4
_PRECISION = 0.02  # of the excess of a leak that is found by bisection


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
    by_coin: bool = False  # whether an independent fair coin decided each presence
    held_out: tuple[int, int] = (0, 0)  # absent and present scores on which the threshold is chosen
    lengths: tuple[float, ...] = (1.0,)  # equally frequent lengths of canaries, in units of the sensitivity
    signal: float = 1.0  # the mean of normalized scores with the canary
    attack: Callable[[float], Attack] | None = None  # by parameter; None for that of the trade-off
    others: tuple[AuditDesign, ...] = ()  # of rules that share the error and refute the claim as well

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
            by_coin=observations.by_coin,
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
        by_coin: bool = False,
    ) -> AuditDesign:
        """Return a design from the sizes before any hold-out; pass ``num_steps`` if canaries share steps."""

        def with_share(rule: ThresholdRule, share: float) -> AuditDesign:
            left = replace(query, error_rate=rule.error(share * query.error_rate, num_absent))
            if num_steps is None:
                absent, present = rule.counted(num_absent), rule.counted(num_present)
                steps = min(absent, present)
            else:
                steps = rule.counted(num_steps)
                absent, present = (max(size * steps // num_steps, 1) for size in (num_absent, num_present))
            held_out = num_absent - absent, num_present - present
            return cls(inference, rule, left, absent, present, steps, normalized, by_coin, held_out)

        if not isinstance(rule, BestOf):
            return with_share(rule, 1.0)
        main, *others = map(with_share, rule.known_rules, rule.shares)
        return replace(main, others=tuple(others))

    def weakened(self, efficiency: float) -> AuditDesign:
        """Return the design for an attack with this share of the signal, as canaries that short have."""
        others = tuple(other.weakened(efficiency) for other in self.others)
        return replace(self, lengths=(efficiency,), others=others)

    def efficiency(self, claimed: float, auc: float) -> float:
        """Return the share of an ideal attack's signal with this area under its ROC, at most 1.

        The mechanism is taken to be as claimed: an attack on a larger leak has less than this share.
        """
        return signal_share(lambda share: self.weakened(share).attack_on(claimed).auc() < auc, tolerance=1e-2)

    def for_attack(self, attack: Callable[[float], Attack]) -> AuditDesign:
        """Return the design for an attack that is known for every threshold."""
        others = tuple(other.for_attack(attack) for other in self.others)
        return replace(self, attack=attack, normalized=True, others=others)

    @cached_property
    def max_refutable(self) -> float:
        """The largest parameter that an attack without a single error would refute."""
        if isinstance(self.inference, ExactInference):
            return self.rule.largest_bound(self.inference, self._sizes, self.query)
        return max(bets.parameter() for bets in self._perfect_bets(self.num_steps))

    def can_refute(self, claimed: float) -> bool:
        """Return whether an attack without a single error would refute ``claimed``."""
        if any(other.can_refute(claimed) for other in self.others):
            return True
        if isinstance(self.inference, ExactInference):
            return self._refutes_without_errors(claimed)
        # far fewer steps than those of a usual run are enough
        first = min(self.num_steps, 64)
        refutes_early = any(bets.parameter() > claimed for bets in self._perfect_bets(first))
        return refutes_early or (first < self.num_steps and self.max_refutable > claimed)

    def _refutes_without_errors(self, claimed: float) -> bool:
        """Return whether the counts of an attack without errors refute ``claimed``.

        What Clopper-Pearson limits refute then has at most half of the error everywhere on its curve, so
        JointExact refutes it too. They need only the claimed curve, and the largest refuted one is costly.
        """
        has_one_threshold = type(self.rule).largest_bound is ThresholdRule.largest_bound
        if has_one_threshold and isinstance(self.inference, ClopperPearson | JointExact):
            most = ClopperPearson().most_refuting(np.zeros(1, np.int64), claimed, self._sizes, self.query)
            if most[0] >= 0:
                return True
        return self.max_refutable > claimed

    def _perfect_bets(self, num_steps: int) -> Iterator[StepBets]:
        """Yield the bets on this many first steps of attacks without errors.

        Their scores may all be far from the threshold, or none.
        """
        assert isinstance(self.inference, Betting)
        none = np.zeros(num_steps, dtype=np.int64)
        absent, present = (np.full(num_steps, size) for size in self.per_step())
        errors = StepErrors(none, absent, none, present, by_coin=self.by_coin)
        num_far = len(self.inference.far_guesses(self.query)) if self.bets_on_tails else 0
        for right in (0.0, 2.0) if num_far else (0.0,):
            far = [(np.full(num_steps, right), np.zeros(num_steps))] * num_far
            yield self.inference.place(errors, self.query, far)

    @property
    def bets_on_tails(self) -> bool:
        """Whether scores far from the threshold are known, on which Betting may bet."""
        return self.normalized or isinstance(self.rule, Predictable)

    def power(self, claimed: float, actual: float) -> float:
        """Return the probability of refuting ``claimed`` when the mechanism has parameter ``actual``.

        The scores are those of the trade-off's :meth:`~dpaudit.TradeOff.attack`, and the threshold is where
        the rule puts it. Several rules detect slightly more than the best of them, but much less than if they
        were independent, since they see the same scores.
        """
        powers = [self._power(claimed, actual), *(other.power(claimed, actual) for other in self.others)]
        most = max(powers)
        independent = 1 - math.prod(1 - power for power in powers)
        # a quarter of what independent rules would add, as in simulations
        return most + 0.25 * (independent - most)

    def _power(self, claimed: float, actual: float) -> float:
        if isinstance(self.inference, Betting):
            return BettingPower(self, claimed).detection_rate(actual)
        # where a curve is 0 in floating point, regions are not exact
        if not self._refutes_without_errors(claimed):
            return 0.0
        assert isinstance(self.inference, ExactInference)
        attack = self.attack_on(actual)
        limits = self.rule.refuting_limits(claimed, self._sizes, self.inference, self.query)
        if limits:
            return self.rule.detection_rate(attack, limits, self._sizes)
        fpr, fnr = self.rule.operating_points(attack, self)
        region = self._refuting_region(claimed, fpr)
        powers = [min(region.probability(*rates), 1.0) for rates in zip(fpr, fnr, strict=True)]
        return float(np.mean(powers))

    def attack_on(self, parameter: float) -> Attack:
        """Return the attack on a mechanism with this parameter."""
        if self.attack is not None:
            return self.attack(parameter)
        attack = self.query.tradeoff.attack(parameter, self.query.delta, self.lengths)
        return attack if self.signal == 1 else attack.in_units(self.signal)

    def _refuting_region(self, claimed: float, fpr: FloatArray) -> Region:
        """Return the refuting outcomes for all plausible counts; calls with similar rates share a region."""
        assert isinstance(self.inference, ExactInference)
        ends = [
            plausible_rate(round(rate * self.num_absent), self.num_absent, 1e-3)[end]
            for end, rate in enumerate((float(fpr.min()), float(fpr.max())))
        ]
        per_unit = max(_LOGITS, math.isqrt(self.num_absent) // _ROOT_PER_LOGIT)
        low = math.floor(per_unit * float(special.logit(max(ends[0], 1e-9))))
        high = math.ceil(per_unit * float(special.logit(min(ends[1], 1 - 1e-9))))
        key = claimed, low, high
        if key not in self._regions:
            least = 0.0 if ends[0] < 1e-9 else float(special.expit(low / per_unit))
            interval = least, float(special.expit(high / per_unit))
            # a region of 10 million counts may have 50 MB
            if self.num_absent > 1_000_000:
                self._regions.clear()
            self._regions[key] = self.inference.refuting_region(claimed, self._sizes, interval, self.query)
        return self._regions[key]

    @property
    def _sizes(self) -> ErrorCounts:
        return ErrorCounts.perfect(self.num_absent, self.num_present)

    @cached_property
    def _regions(self) -> dict[tuple[float, int, int], Region]:
        return {}

    def smallest_leak(self, claimed: float, probability: float = 0.8) -> float:
        """Return the smallest parameter above ``claimed`` that would be detected with this probability."""
        if self.attack is None:
            return _cached_leak(self._without_coins(), claimed, probability)
        return self._leak(claimed, probability)

    def _leak(self, claimed: float, probability: float) -> float:
        if not any(self.lengths):
            return math.inf
        if isinstance(self.inference, Betting) and not self.others:
            return BettingPower(self, claimed).smallest_leak(probability)
        if not self.can_refute(claimed):
            return math.inf
        target = float(special.ndtri(probability))

        def missing(excess: float) -> float:
            power = min(max(self.power(claimed, claimed + excess), 1e-300), 1 - 1e-16)
            return target - float(special.ndtri(power))

        return claimed + last_positive(missing, max(0.1 * claimed, 1e-6), tolerance=1e-2, step=4.0)

    def _without_coins(self) -> AuditDesign:
        """Return the design with equal sides, if coins decided them: their outcome hardly matters."""
        if not self.by_coin or not isinstance(self.inference, Betting):
            return self
        total = self.num_absent + self.num_present
        return replace(self, num_absent=total // 2, num_present=total - total // 2)

    def per_step(self, num_steps: int | None = None) -> tuple[int, int]:
        """Return the numbers of absent and present scores in one of ``num_steps`` steps, at least 1 each."""
        steps = self.num_steps if num_steps is None else num_steps
        absent = max(round(self.num_absent / steps), 1)
        if self.by_coin:  # coins decide the sides, but not how many guesses there are
            return absent, max(round((self.num_absent + self.num_present) / steps) - absent, 1)
        return absent, max(round(self.num_present / steps), 1)


@lru_cache(maxsize=256)
def _cached_leak(design: AuditDesign, claimed: float, probability: float) -> float:
    """Return the smallest leak; a test suite audits many runs of the same design."""
    return design._leak(claimed, probability)


def detection_rate(margins: FloatArray, spread: float) -> float:
    """Return the mean probability that the bound exceeds the claim, if that of each run has this margin."""
    return float(special.ndtr(margins / max(spread, 1e-12)).mean())


def needed_shift(margins: FloatArray, spread: float, probability: float) -> float:
    """Return what to add to all margins to reach this detection rate."""
    low = float(-margins.max()) - 40 * spread
    high = float(-margins.min()) + 40 * spread
    for _ in range(60):
        middle = (low + high) / 2
        is_enough = detection_rate(margins + middle, spread) >= probability
        low, high = (low, middle) if is_enough else (middle, high)
    return high


class BettingPower:
    """The power of bets against ``claimed``, by simulation.

    The advantage of a step is its fraction of right guesses minus its fraction of wrong ones. Bets refute the
    claim if they show that its mean is larger than the claim allows.
    """

    def __init__(self, design: AuditDesign, claimed: float) -> None:
        assert isinstance(design.inference, Betting)
        self._design, self._betting, self._claimed = design, design.inference, claimed
        self._allowed = 1 - 2 * design.query.tradeoff.balanced_error(claimed)
        self._num_steps = min(design.num_steps, 2048)
        most_runs = int(np.clip(_MOST_SIMULATED / self._num_steps, *_RUNS))
        self._num_runs = _SHORT_RUNS if self.is_short else most_runs
        # one simulated step stands for several of a long run
        self._absent, self._present = design.per_step(self._num_steps)
        horizon, merged = self._betting.horizon, design.num_steps / self._num_steps
        if horizon is not None:
            self._betting = replace(self._betting, horizon=max(round(horizon / merged), 1))

    def detection_rate(self, actual: float) -> float:
        """Return the probability of refuting the claim if the mechanism has this parameter."""
        if self.is_short:
            return float((self._simulated(actual)[0].evidence(self._allowed) > 0).mean())
        return detection_rate(*self._margins(actual))

    @property
    def is_short(self) -> bool:
        """Whether detected runs are counted, which holds for any leak, but for this number of steps alone."""
        return self._num_steps < _SHORT

    def size_factor(self, actual: float, probability: float) -> float:
        """Return by how much to multiply the number of guesses to detect ``actual`` with this probability.

        Distances of bounds from the mean are taken to decrease with the square root of that number.
        """
        margins, spread = self._margins(actual)
        excess = self._advantage(actual) - self._allowed

        def is_missed(factor: float) -> bool:
            scaled = excess - (excess - margins) / math.sqrt(factor)
            return detection_rate(scaled, spread / math.sqrt(factor)) < probability

        return last_true(is_missed, 1.0, tolerance=1e-3)

    def smallest_leak(self, probability: float) -> float:
        """Return the smallest parameter that is detected with this probability, infinity if there is none."""
        if not self._design.can_refute(self._claimed):
            return math.inf
        if self.is_short:
            return self._bisected(probability)
        most = self._advantage(_LEAKIEST * max(self._claimed, 1.0))
        needed = self._first_guess()
        for _ in range(4):
            advantage = min(needed, (self._allowed + 9 * most) / 10)
            parameter = self._with_advantage(advantage)
            needed = advantage + needed_shift(*self._margins(parameter), probability)
            if abs(needed - advantage) < 0.06 * (advantage - self._allowed):
                break
        return self._with_advantage(needed)

    def _bisected(self, probability: float) -> float:
        """Return the smallest leak with this share of detected runs; all leaks share random numbers."""
        if self.detection_rate(_LEAKIEST * max(self._claimed, 1.0)) < probability:
            return math.inf

        def missing(excess: float) -> float:
            rate = np.clip(self.detection_rate(self._claimed + excess), 1 / _SHORT_RUNS, 1 - 1 / _SHORT_RUNS)
            return float(special.ndtri(probability) - special.ndtri(rate))

        start = max(self._with_advantage(self._first_guess()) - self._claimed, 1e-6)
        # the upper end of the last bracket: the share may jump
        return self._claimed + (1 + _PRECISION) * last_positive(missing, start, _PRECISION, step=1.5)

    def _first_guess(self) -> float:
        """Return an advantage that is about large enough."""
        guesses = self._design.num_absent + self._design.num_present
        spread = math.sqrt((1 - self._allowed**2) / guesses)
        return self._allowed + 3.4 * spread + 1.5 * self._allowed / self._design.num_steps

    def _advantage(self, parameter: float) -> float:
        """Return the mean advantage at the best threshold, or at the one that is fixed."""
        attack = self._design.attack_on(parameter)
        if isinstance(self._design.rule, Predictable | HeldOut):
            return 1 - sum(attack.balanced())
        fpr, fnr = self._design.rule.operating_points(attack, self._design)
        return 1 - (float(fpr.mean()) + float(fnr.mean()))

    def _with_advantage(self, advantage: float) -> float:
        """Return the parameter with this mean advantage, infinity if there is none."""
        start = max(0.1 * self._claimed, 1e-6)
        return self._claimed + last_positive(
            lambda excess: advantage - self._advantage(self._claimed + excess), start, tolerance=1e-4
        )

    def _margins(self, parameter: float) -> tuple[FloatArray, float]:
        """Simulate by how much the bound of a run with its expected advantage exceeds the allowed one.

        Return also the standard deviation of the mean advantage of a run.
        """
        bets, (fpr, fnr) = self._simulated(parameter)
        absent, present = self._absent, self._present
        variances = fpr * (1 - fpr) / absent + fnr * (1 - fnr) / present
        if self._design.by_coin:
            variances = (fpr + fnr) * (2 - fpr - fnr) / (absent + present)
        expected = np.broadcast_to(1 - fpr - fnr, (self._num_runs, self._num_steps)).mean(axis=1)
        spread = math.sqrt(float(variances.mean()) / self._num_steps)
        return expected - bets.distances() - self._allowed, spread

    def _simulated(self, parameter: float) -> tuple[AdvantageBets, tuple[FloatArray, FloatArray]]:
        """Bet on simulated runs of a mechanism with this parameter; return its error rates, too."""
        design, absent, present = self._design, self._absent, self._present
        fpr, fnr = self._rates(design.attack_on(parameter))
        rng, shape = np.random.default_rng(3), (self._num_runs, self._num_steps)

        def errors(size: int, rate: FloatArray) -> FloatArray:
            if self.is_short:  # errors that rise with the rate, so that leaks can be compared
                return np.asarray(stats.binom.ppf(rng.random(shape), size, rate))
            return rng.binomial(size, rate, shape).astype(np.float64)

        guesses = absent + present
        if design.by_coin:
            advantages = 1 - 2 * errors(guesses, (fpr + fnr) / 2) / guesses
        else:
            advantages = 1 - errors(absent, fpr) / absent - errors(present, fnr) / present
        bets = self._betting.main_bets(
            guesses,
            design.query,
            by_coin=design.by_coin,
            with_tails=design.bets_on_tails,
            num_runs=self._num_runs,
        )
        bets.extend(advantages)
        return bets, (fpr, fnr)

    def _rates(self, attack: Attack) -> tuple[FloatArray, FloatArray]:
        """Return both rates, to be broadcast to runs x steps."""
        if isinstance(self._design.rule, Predictable):
            fpr, fnr = step_rates(attack, (self._absent, self._present), self._num_steps)
            return fpr[None, :], fnr[None, :]
        fpr, fnr = self._design.rule.operating_points(attack, self._design)
        runs = np.arange(self._num_runs) % fpr.size
        return fpr[runs, None], fnr[runs, None]

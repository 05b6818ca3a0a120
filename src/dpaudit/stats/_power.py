"""The power of an audit: which leaks its size and method could have detected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray
from dpaudit.stats._binomial import Region, plausible_rate
from dpaudit.stats._bound import LARGEST, number, plain
from dpaudit.stats._counts import ErrorCounts, StepErrors
from dpaudit.stats._observations import Observations
from dpaudit.stats._simulated_bets import BettingPower
from dpaudit.stats.inference import (
    Betting,
    BoundQuery,
    ClopperPearson,
    ExactInference,
    Inference,
    JointExact,
)
from dpaudit.stats.inference._betting import StepBets
from dpaudit.stats.rootfinding import last_positive, last_true
from dpaudit.stats.thresholds import BestOf, Predictable, ThresholdRule
from dpaudit.stats.tradeoffs._attack import MECHANISMS, Attack

if TYPE_CHECKING:
    from dpaudit.stats._result import Hypothesis

# Ends of that interval are on a lattice of the logit, so that calls share regions: this many per unit, and
# more for many scores, whose plausible rates are close together.
_LOGITS, _ROOT_PER_LOGIT = 2, 64


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
        if isinstance(rule, BestOf):
            shares = zip(rule.known_rules, rule.shares, strict=True)
            first, *rest = (
                cls.sized(
                    num_absent=num_absent,
                    num_present=num_present,
                    num_steps=num_steps,
                    inference=inference,
                    rule=shared_rule,
                    query=replace(query, error_rate=share * query.error_rate),
                    normalized=normalized,
                    by_coin=by_coin,
                )
                for shared_rule, share in shares
            )
            return replace(first, others=tuple(rest))
        left = replace(query, error_rate=rule.error(query.error_rate, num_absent))
        if num_steps is None:
            absent, present = rule.counted(num_absent), rule.counted(num_present)
            steps = min(absent, present)
        else:
            steps = rule.counted(num_steps)
            absent, present = (max(size * steps // num_steps, 1) for size in (num_absent, num_present))
        held_out = num_absent - absent, num_present - present
        return cls(inference, rule, left, absent, present, steps, normalized, by_coin, held_out)

    def weakened(self, efficiency: float) -> AuditDesign:
        """Return the design for an attack with this share of the signal, as canaries that short have."""
        others = tuple(other.weakened(efficiency) for other in self.others)
        return replace(self, lengths=(efficiency,), others=others)

    def efficiency(self, claimed: float, auc: float) -> float:
        """Return the share of an ideal attack's signal with this area under its ROC, at most 1.

        The mechanism is taken to be as claimed: an attack on a larger leak has less than this share.
        """

        def falls_short(share: float) -> bool:
            return share <= 1 and self.weakened(share).attack_on(claimed).auc() < auc

        if not falls_short(0.001):
            return 0.0
        return min(last_true(falls_short, 0.3, tolerance=1e-2), 1.0)

    def for_attack(self, attack: Callable[[float], Attack]) -> AuditDesign:
        """Return the design for an attack that is known for every threshold."""
        others = tuple(other.for_attack(attack) for other in self.others)
        return replace(self, attack=attack, normalized=True, others=others)

    def max_refutable(self) -> float:
        """Return the largest parameter that an attack without a single error would refute."""
        return self._max_refutable

    @cached_property
    def _max_refutable(self) -> float:
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
        return refutes_early or (first < self.num_steps and self.max_refutable() > claimed)

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
        return self.max_refutable() > claimed

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
        if not self._refutes_without_errors(
            claimed
        ):  # where a curve is 0 in floating point, regions are not exact
            return 0.0
        attack, limits = self.attack_on(actual), self._refuting_limits(claimed)
        if limits:
            return self.rule.detection_rate(attack, limits, self._sizes)
        fpr, fnr = self.operating_points(attack)
        region = self._refuting_region(claimed, fpr)
        powers = [min(region.probability(*rates), 1.0) for rates in zip(fpr, fnr, strict=True)]
        return float(np.mean(powers))

    def may_detect(self, claimed: float, actual: float) -> bool:
        """Return whether enough counts would refute ``claimed``: the errors are below the claimed curve."""
        if self.others:
            return True
        fpr, fnr = self.operating_points(self.attack_on(actual))
        return bool((fnr < self.query.tradeoff.fnr(claimed, fpr)).any())

    def operating_points(self, attack: Attack) -> tuple[FloatArray, FloatArray]:
        """Return the rates at which the rule may put the threshold, equally likely."""
        return self.rule.operating_points(attack, self)

    def attack_on(self, parameter: float) -> Attack:
        """Return the attack on a mechanism with this parameter."""
        if self.attack is not None:
            return self.attack(parameter)
        attack = self.query.tradeoff.attack(parameter, self.query.delta, self.lengths)
        return attack if self.signal == 1 else attack.in_units(self.signal)

    def _refuting_region(self, claimed: float, fpr: FloatArray) -> Region:
        """Return the refuting outcomes for all plausible counts; calls with similar rates share a region."""
        ends = [
            plausible_rate(round(rate * self.num_absent), self.num_absent, 1e-3)[end]
            for end, rate in enumerate((float(fpr.min()), float(fpr.max())))
        ]
        per_unit = max(_LOGITS, math.isqrt(self.num_absent) // _ROOT_PER_LOGIT)
        low = math.floor(per_unit * float(special.logit(max(ends[0], 1e-9))))
        high = math.ceil(per_unit * float(special.logit(min(ends[1], 1 - 1e-9))))
        key = claimed, low, high
        if key not in self._regions:
            interval = (
                0.0 if ends[0] < 1e-9 else float(special.expit(low / per_unit)),
                float(special.expit(high / per_unit)),
            )
            assert isinstance(self.inference, ExactInference)
            # a region of 10 million counts may have 50 MB
            if self.num_absent > 1_000_000:
                self._regions.clear()
            self._regions[key] = self.inference.refuting_region(claimed, self._sizes, interval, self.query)
        return self._regions[key]

    def _refuting_limits(self, claimed: float) -> tuple[IntArray, ...]:
        if claimed not in self._limits:
            assert isinstance(self.inference, ExactInference)
            self._limits[claimed] = self.rule.refuting_limits(
                claimed, self._sizes, self.inference, self.query
            )
        return self._limits[claimed]

    @property
    def _sizes(self) -> ErrorCounts:
        return ErrorCounts.perfect(self.num_absent, self.num_present)

    @cached_property
    def _regions(self) -> dict[tuple[float, int, int], Region]:
        return {}

    @cached_property
    def _limits(self) -> dict[float, tuple[IntArray, ...]]:
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


@dataclass(frozen=True, kw_only=True)
class Power:
    """The smallest leak that the audit would have detected with the given probability.

    ``is_ideal`` if that takes an ideal attack, which raw scores need not come from. Then ``efficiency`` is
    the signal of the actual attack relative to an ideal one, if the power is that of an attack with it.
    """

    probability: float
    epsilon: float
    parameter: float
    # noise of the leak relative to the claimed noise; None if the parameter is not an inverse noise
    noise_factor: float | None
    # mean length of canaries after clipping, in clipping norms; None if it is 1 or not known
    canary_length: float | None = None
    # the mechanism that has this epsilon; None if it follows from the curve
    mechanism: str | None = None
    is_ideal: bool = False
    efficiency: float | None = None

    @classmethod
    def of(
        cls,
        parameter: float,
        hypothesis: Hypothesis,
        probability: float,
        lengths: tuple[float, ...] = (1.0,),
        *,
        is_ideal: bool = False,
        efficiency: float | None = None,
    ) -> Power:
        """Return the leak of a mechanism with the given parameter, detected by canaries of these lengths."""
        scales = hypothesis.tradeoff.is_inverse_noise
        length = float(np.mean(lengths))
        return cls(
            probability=probability,
            epsilon=hypothesis.epsilon(parameter),
            parameter=parameter,
            noise_factor=hypothesis.parameter / parameter if scales else None,
            canary_length=length if length < 0.995 else None,
            mechanism=hypothesis.tradeoff.attacked_mechanism,
            is_ideal=is_ideal,
            efficiency=efficiency,
        )

    def __str__(self) -> str:
        detected = f"would have been detected with {_validate.percent(self.probability)} probability"
        text = f"no leak {detected}" if math.isinf(self.parameter) else f"{self._leak} {detected}"
        if self.efficiency is not None:
            return (
                f"shows {self.efficiency:.2g} of an ideal attack's signal, if the noise is as claimed; with "
                f"that share of it, {text} (an estimate from its own scores)"
            )
        if self.is_ideal:
            return f"{text} by an ideal attack with this many scores"
        if not math.isinf(self.parameter):
            text += " by an attack of this design"
        if self.canary_length is not None:
            text += f" (canaries reach {self.canary_length:.2g} of the clipping norm)"
        return text

    @property
    def _leak(self) -> str:
        text = f"a true epsilon of {self.epsilon:.4g}"
        if self.mechanism is not None:
            text = f"{self.mechanism} with {text}"
        if self.noise_factor is not None:
            text += f" (noise at {self.noise_factor:.4g} of the claimed level)"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        optional = {
            "canary_length": self.canary_length,
            "mechanism": self.mechanism,
            "is_ideal": self.is_ideal or None,
            "efficiency": self.efficiency,
        }
        return {
            "probability": self.probability,
            "epsilon": plain(self.epsilon),
            "parameter": plain(self.parameter),
            "noise_factor": self.noise_factor,
            **{name: value for name, value in optional.items() if value is not None},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Power:
        """Restore a power from :meth:`to_dict`; invalid values raise ``InputError``."""
        _validate.mapping("the values of a power", values)

        def optional(name: str, high: float) -> float | None:
            return None if values.get(name) is None else number(values, name, high=high)

        mechanism = values.get("mechanism")
        return cls(
            probability=number(values, "probability", high=1.0),
            epsilon=number(values, "epsilon"),
            parameter=number(values, "parameter"),
            noise_factor=optional("noise_factor", LARGEST),
            canary_length=optional("canary_length", 1.0),
            mechanism=mechanism if mechanism in MECHANISMS else None,
            is_ideal=values.get("is_ideal") is True,
            efficiency=optional("efficiency", 1.0),
        )

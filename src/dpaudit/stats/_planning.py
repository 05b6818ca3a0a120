"""How many observations an audit needs to detect a given leak, planned before the audit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._audit import fixed_rule
from dpaudit.stats._bound import Power
from dpaudit.stats._power import AuditDesign, BettingPower
from dpaudit.stats._result import Claimed, Hypothesis
from dpaudit.stats.inference import Betting, BoundQuery, ExactInference, Inference, JointExact
from dpaudit.stats.rootfinding import first_true_integer, last_true
from dpaudit.stats.tradeoffs import TradeOff

_MOST = 10_000_000  # more would not be practical
_MOST_SCORES = 250_000_000  # per side; with more, computing the power takes too long


@dataclass(frozen=True, kw_only=True)
class Leak:
    """The leak to detect: noise at ``noise_factor`` of the claimed level, or a true ``epsilon``."""

    noise_factor: float | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        if (self.noise_factor is None) == (self.epsilon is None):
            raise InputError(f"A leak needs either noise_factor or epsilon, got {self!r}.")
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", _validate.positive("epsilon", self.epsilon))
        if self.noise_factor is not None:
            factor = _validate.finite("noise_factor", self.noise_factor)
            object.__setattr__(self, "noise_factor", factor)
            if not 0 < factor < 1:
                raise InputError(
                    f"noise_factor must be above 0 and below 1, got {factor:g}: only noise below the "
                    "claimed level is a leak."
                )

    def parameter(self, claim: Claimed, hypothesis: Hypothesis) -> float:
        """Return the leaky mechanism's parameter in the family of ``hypothesis``."""
        if self.noise_factor is None:
            return self._with_epsilon(claim, hypothesis)
        if not hypothesis.tradeoff.is_inverse_noise:
            raise InputError(
                f"noise_factor needs a curve with a noise level, got {hypothesis.tradeoff} of the claim "
                f"{claim.summary}; state the leak by its true epsilon."
            )
        return hypothesis.parameter / self.noise_factor

    def _with_epsilon(self, claim: Claimed, hypothesis: Hypothesis) -> float:
        assert self.epsilon is not None
        claimed, epsilon = hypothesis.parameter, self.epsilon
        if epsilon > claim.epsilon:
            actual = last_true(lambda p: hypothesis.epsilon(p) <= epsilon, 1.1 * claimed)
            if actual > claimed:
                return actual
        raise InputError(
            f"The true epsilon must be above the claimed {claim.epsilon:.4g} to be a leak, got {epsilon:g}."
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes at which an audit detects a leak with probability ``leak.probability``.

    One of the two sizes is the result of the search, and is None if no number up to ``most`` suffices.
    """

    inference: Inference
    leak: Power
    num_steps: int | None
    num_canaries: int | None  # per step and side
    most: int

    @property
    def num_observations(self) -> int | None:
        """The number of scores per side."""
        if self.num_steps is None or self.num_canaries is None:
            return None
        return self.num_steps * self.num_canaries

    def __str__(self) -> str:
        leak = f"epsilon {_validate.rounded(self.leak.epsilon)}"
        if self.leak.noise_factor is not None:
            leak = f"noise at {_validate.percent(self.leak.noise_factor, 3)} of the claim ({leak})"
        verb = "does not detect" if self.num_observations is None else "detects"
        steps = f"in {self.num_steps:,} steps" if self.num_steps else f"within {self.most:,} steps"
        canaries = f"{self.num_canaries:,}" if self.num_canaries else f"up to {self.most:,}"
        often = _validate.percent(self.leak.probability)
        return (
            f"{self.inference.label} {verb} {leak}, {often} of the time, {steps} with {canaries} "
            f"{'canary' if canaries == '1' else 'canaries'} per side."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "inference": self.inference.to_dict(),
            "num_steps": self.num_steps,
            "num_canaries": self.num_canaries,
            "num_observations": self.num_observations,
            "most": self.most,
            "leak": self.leak.to_dict(),
            "sentence": str(self),
        }


def plan_observations(
    claim: Claimed,
    leak: Leak,
    *,
    inference: Inference | None = None,
    power: float = 0.8,
    confidence: float = 0.95,
    tradeoff: TradeOff | None = None,
) -> Plan:
    """Return how many independent scores per side are needed to detect a leak.

    As for all planning functions, scores are normalized and the threshold is the midpoint.

    Args:
        claim: What is claimed.
        leak: The leak that must not be missed.
        inference: How a bound follows from errors, by default ``JointExact()``.
        power: The probability with which the leak is detected.
        confidence: The confidence of the verdict.
        tradeoff: The curve to test, by default that of the claim.

    Returns:
        The number of scores, or that no number suffices.

    >>> from dpaudit import Claim
    >>> claim = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    >>> plan_observations(claim, Leak(noise_factor=0.5)).num_observations
    28

    """
    planner = _Planner.of(claim, inference or JointExact(), confidence, tradeoff)
    return planner.plan_steps(planner.leak(leak, power), 1)


def plan_steps(
    claim: Claimed,
    leak: Leak,
    *,
    num_canaries: int,
    inference: Inference | None = None,
    power: float = 0.8,
    confidence: float = 0.95,
    tradeoff: TradeOff | None = None,
) -> Plan:
    """Return how many steps are needed to detect a leak with several canaries in each.

    Args:
        claim: What is claimed.
        leak: The leak that must not be missed.
        num_canaries: The number of scores per step and side.
        inference: How a bound follows from errors, by default ``Betting()``.
        power: The probability with which the leak is detected.
        confidence: The confidence of the verdict.
        tradeoff: The curve to test, by default that of the claim.

    Returns:
        The number of steps, or that no number suffices.

    >>> from dpaudit import Claim
    >>> claim = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    >>> plan_steps(claim, Leak(noise_factor=0.5), num_canaries=64).num_canaries
    64

    """
    planner = _Planner.of(claim, inference or Betting(), confidence, tradeoff)
    return planner.plan_steps(planner.leak(leak, power), _validated_size("num_canaries", num_canaries))


def plan_canaries(
    claim: Claimed,
    leak: Leak,
    *,
    num_steps: int,
    inference: Inference | None = None,
    power: float = 0.8,
    confidence: float = 0.95,
    tradeoff: TradeOff | None = None,
) -> Plan:
    """Return how many canaries per step and side are needed to detect a leak in these steps.

    Args:
        claim: What is claimed.
        leak: The leak that must not be missed.
        num_steps: The number of steps.
        inference: How a bound follows from errors, by default ``Betting()``.
        power: The probability with which the leak is detected.
        confidence: The confidence of the verdict.
        tradeoff: The curve to test, by default that of the claim.

    Returns:
        The number of canaries, or that no number suffices.

    >>> from dpaudit import Claim
    >>> claim = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    >>> plan_canaries(claim, Leak(noise_factor=0.5), num_steps=50).num_steps
    50

    """
    planner = _Planner.of(claim, inference or Betting(), confidence, tradeoff)
    return planner.plan_canaries(planner.leak(leak, power), _validated_size("num_steps", num_steps))


def smallest_leak(
    claim: Claimed,
    *,
    num_steps: int,
    num_canaries: int = 1,
    inference: Inference | None = None,
    power: float = 0.8,
    confidence: float = 0.95,
    tradeoff: TradeOff | None = None,
) -> Power:
    """Return the smallest leak that an audit of this size detects.

    Args:
        claim: What is claimed.
        num_steps: The number of steps.
        num_canaries: The number of scores per step and side.
        inference: How a bound follows from errors, by default ``JointExact()``; for several canaries per
            step, ``Betting()``.
        power: The probability with which the leak is detected.
        confidence: The confidence of the verdict.
        tradeoff: The curve to test, by default that of the claim.

    Returns:
        The leak, as ``Result.power`` states it.

    >>> from dpaudit import Claim
    >>> print(smallest_leak(Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=1000))
    detects noise below 86 % of the claim (epsilon 5.15), 80 % of the time

    """
    method = inference or (JointExact() if num_canaries == 1 else Betting())
    planner = _Planner.of(claim, method, confidence, tradeoff)
    sizes = _validated_size("num_steps", num_steps), _validated_size("num_canaries", num_canaries)
    _validate.integer("num_steps x num_canaries", sizes[0] * sizes[1], high=_MOST_SCORES)
    claimed = planner.hypothesis.parameter
    design = planner.design(*sizes, has_others=True)
    parameter = design.smallest_leak(claimed, _validate.fraction("power", power))
    return Power.of(parameter, planner.hypothesis, power)


def _validated_size(name: str, value: int) -> int:
    return _validate.integer(name, value, high=_MOST_SCORES)


@dataclass(frozen=True)
class _Planner:
    """A search for the sizes at which a method refutes a claim."""

    claim: Claimed
    hypothesis: Hypothesis
    query: BoundQuery
    inference: Inference

    @classmethod
    def of(
        cls, claim: Claimed, inference: Inference, confidence: float, tradeoff: TradeOff | None
    ) -> _Planner:
        if not isinstance(inference, ExactInference | Betting):
            raise InputError(
                "inference must be ClopperPearson(), JointExact() or Betting(), whose power is known, got "
                f"{inference!r}."
            )
        _validate.instance("claim", claim, Claimed, "a Claim such as Claim.gaussian(...)")
        hypothesis = claim.hypothesis(tradeoff)
        error = 1 - _validate.confidence(confidence)
        return cls(claim, hypothesis, BoundQuery(hypothesis.tradeoff, claim.delta, error), inference)

    def leak(self, leak: Leak, power: float) -> Power:
        _validate.instance("leak", leak, Leak, "a Leak such as Leak(noise_factor=0.8)")
        parameter = leak.parameter(self.claim, self.hypothesis)
        return Power.of(parameter, self.hypothesis, _validate.fraction("power", power))

    def design(self, num_steps: int, num_canaries: int, *, has_others: bool = False) -> AuditDesign:
        """Return the design of the default audit; coins decide the presence of several canaries per step."""
        size, inference = num_steps * num_canaries, self.inference
        if isinstance(inference, Betting) and inference.expected is None:
            inference = replace(inference, expected=self.hypothesis.parameter)
        design = AuditDesign.sized(
            num_absent=size,
            num_present=size,
            num_steps=num_steps if num_canaries > 1 else None,
            inference=inference,
            rule=fixed_rule(size, is_stepped=num_canaries > 1, inference=inference),
            query=self.query,
            by_coin=num_canaries > 1,
        )
        # too little noise is detected by the main rule; the others take long to evaluate for every size
        is_main = self.hypothesis.tradeoff.is_inverse_noise and not has_others
        return replace(design, others=()) if is_main else design

    def plan_steps(self, leak: Power, num_canaries: int) -> Plan:
        most = _MOST if isinstance(self.inference, Betting) else max(_MOST // num_canaries, 1)
        steps = self._enough(leak, lambda n: self.design(n, num_canaries), most)
        return Plan(
            inference=self.inference, leak=leak, num_steps=steps, num_canaries=num_canaries, most=most
        )

    def plan_canaries(self, leak: Power, num_steps: int) -> Plan:
        most = max(_MOST // num_steps, 1)
        canaries = self._enough(leak, lambda n: self.design(num_steps, n), most)
        return Plan(
            inference=self.inference, leak=leak, num_steps=num_steps, num_canaries=canaries, most=most
        )

    def _enough(self, leak: Power, design: Callable[[int], AuditDesign], most: int) -> int | None:
        """Return the smallest sufficient size to four digits; further digits only reflect discreteness."""
        claimed, actual = self.hypothesis.parameter, leak.parameter
        if isinstance(self.inference, Betting):
            return self._enough_bets(leak, design, most)
        many = design(1000)  # enough scores for tails
        fpr, fnr = many.rule.operating_points(many.attack_on(actual), many)
        if not many.others and not (fnr < self.query.tradeoff.fnr(claimed, fpr)).any():
            return None  # no number of scores would refute the claim
        index = first_true_integer(
            lambda i: design(_nth_size(i)).power(claimed, actual) >= leak.probability, 1, _size_index(most)
        )
        return None if index is None else _nth_size(index)

    def _enough_bets(self, leak: Power, design: Callable[[int], AuditDesign], most: int) -> int | None:
        """Return a sufficient size; its power is as precise as simulations are, two or three points."""
        claimed, actual = self.hypothesis.parameter, leak.parameter

        def is_enough(count: int) -> bool:
            return design(count).power(claimed, actual) >= leak.probability

        if BettingPower(design(most), claimed).is_short:  # few steps, of which more canaries are needed
            index = first_true_integer(lambda i: is_enough(_nth_size(i)), 1, _size_index(most))
            return None if index is None else _nth_size(index)
        size, tried = 1, set[int]()
        while size not in tried and len(tried) < 12:
            tried.add(size)
            factor = BettingPower(design(size), claimed).size_factor(actual, leak.probability)
            needed = most if size * factor >= most else max(math.ceil(size * factor), 1)
            size = needed if abs(needed - size) > 0.01 * size else max(needed, size)
        if size <= 32:
            return first_true_integer(is_enough, 1, min(2 * size, most))
        return None if size == most and not is_enough(size) else _nth_size(_size_index(size))


def _nth_size(index: int) -> int:
    """Return the number at ``index`` in the sequence of integers with at most four significant digits.

    >>> [_nth_size(index) for index in (1, 9999, 10_000, 10_001, 19_000)]
    [1, 9999, 10000, 10010, 100000]
    """
    exponent = max((index - 1000) // 9000, 0)
    return (index - 9000 * exponent) * int(10**exponent)


def _size_index(size: int) -> int:
    """Return the index of the largest number up to ``size`` in the sequence of :func:`_nth_size`.

    >>> _size_index(10_005), _size_index(9_999), _size_index(7)
    (10000, 9999, 7)
    """
    exponent = max(len(str(size)) - 4, 0)
    return 9000 * exponent + size // int(10**exponent)

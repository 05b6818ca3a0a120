"""Bounds from the guesses in one training run, valid even if its canaries are dependent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.errors import InputError
from dpaudit.stats._bound import Bound
from dpaudit.stats._counts import Guesses
from dpaudit.stats._presence import FAIR
from dpaudit.stats._serialization import NamedPart
from dpaudit.stats.inference import Kind, binomial_cdf
from dpaudit.stats.rootfinding import first_true_integer, last_true, smallest_error
from dpaudit.stats.tradeoffs import ApproximateDP, Attack, TradeOff, signal_share

# assumptions, which docs/verdicts.md explains
_FIXED_NUMBER = "the number of guesses was fixed before seeing the data"
_RELEASE_ALONE = (
    "which canaries were guessed, and the guesses, depend only on what the training run released, not on "
    "which canaries were present"
)


def one_run_bound(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> Bound:
    """Return the (eps, delta) bound of Steinke, Nasr and Jagielski 2023.

    Args:
        guesses: The guesses on the canaries of one run, each inserted by a fair coin.
        delta: The delta of the epsilon.
        confidence: The confidence of the bound.

    Returns:
        A confidence bound, valid even if the canaries are dependent.

    >>> guesses = Guesses(num_canaries=1000, num_guesses=100, num_correct=95)
    >>> round(one_run_bound(guesses, delta=1e-5).epsilon, 2)
    2.17

    """
    _require_guesses(guesses)
    delta, error = _validate.delta(delta), 1 - _validate.confidence(confidence)
    epsilon = last_true(lambda eps: _p_value(guesses, eps, delta) <= error)
    family, name = ApproximateDP(delta), "one-run (Steinke 2023)"
    return _bound(guesses, family, epsilon, delta=delta, confidence=confidence, name=name)


def one_run_fdp_bound(
    guesses: Guesses, *, tradeoff: TradeOff, delta: float, confidence: float = 0.95
) -> Bound:
    """Return the bound of Mahloujifar, Melis and Chaudhuri 2024 for any trade-off curve.

    Args:
        guesses: The guesses on the canaries of one run, each inserted by a fair coin.
        tradeoff: The family of curves of the whole run.
        delta: The delta of the epsilon.
        confidence: The confidence of the bound.

    Returns:
        A confidence bound, valid even if the canaries are dependent.

    >>> from dpaudit import Gaussian
    >>> guesses = Guesses(num_canaries=1000, num_guesses=100, num_correct=95)
    >>> round(one_run_fdp_bound(guesses, tradeoff=Gaussian(), delta=1e-5).parameter, 2)
    0.79

    """
    _require_guesses(guesses)
    delta, error = _validate.delta(delta), 1 - _validate.confidence(confidence)
    family = tradeoff.at(delta)
    parameter = last_true(lambda p: too_many_correct(guesses, family, p, error), tolerance=1e-6)
    name = "one-run f-DP (Mahloujifar 2024)"
    return _bound(guesses, family, parameter, delta=delta, confidence=confidence, name=name)


def _require_guesses(guesses: Guesses) -> None:
    if not isinstance(guesses, Guesses):
        raise InputError(f"guesses must be Guesses(...), got {type(guesses).__name__}.")


def _bound(
    guesses: Guesses, family: TradeOff, parameter: float, *, delta: float, confidence: float, name: str
) -> Bound:
    assumed = family.assumption(delta)
    return Bound(
        epsilon=family.epsilon(parameter, delta),
        delta=delta,
        confidence=confidence,
        parameter=parameter,
        tradeoff=family,
        inference=NamedPart(name),
        threshold_rule=NamedPart("guesses"),
        threshold=None,
        counts=guesses,
        kind=Kind.CONFIDENCE,
        assumptions=(*((assumed,) if assumed else ()), FAIR, _RELEASE_ALONE, _FIXED_NUMBER),
    )


def _p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return P[Bin(r, s) >= v] + 2 m delta max_i (1/i) P[v > Bin(r, s) >= v - i]."""
    trials, right = guesses.num_guesses, guesses.num_correct
    if right == 0:
        return 1.0
    lie = math.exp(-float(np.logaddexp(0.0, epsilon)))
    # at least v correct means at most r - v wrong
    wrong = np.asarray([trials - right, *range(trials - right + 1, trials + 1)], dtype=np.float64)
    cdf = binomial_cdf(wrong, trials, lie)
    shares = (cdf[1:] - cdf[0]) / np.arange(1, right + 1)
    return float(cdf[0] + 2 * guesses.num_canaries * delta * shares.max())


def too_many_correct(guesses: Guesses, family: TradeOff, parameter: float, error: float) -> bool:
    """Return whether this many correct guesses have probability below ``error`` under the curve.

    This is the recursion of Algorithm 3 of the paper, from the number of correct guesses down to zero:
    ``right`` and ``wrong`` are the smallest probabilities of a correct and of a wrong guess that are
    consistent with the opposite. The inverse of 1 - f is f(1 - r) for a symmetric f.
    """
    total, correct = guesses.num_guesses, guesses.num_correct
    if correct == 0:
        return False
    right = error * correct / guesses.num_canaries
    wrong = error * (total - correct) / guesses.num_canaries
    for i in range(correct - 1, -1, -1):
        grown = max(wrong, float(family.fnr(parameter, np.asarray(1 - min(right, 1.0)))))
        if grown == wrong:
            break  # nothing changes from here on
        right, wrong = right + i / (total - i) * (grown - wrong), grown
    return right + wrong > total / guesses.num_canaries


def guessed_p_value(guesses: Guesses, family: TradeOff, claimed: float) -> float:
    """Return the smallest error rate at which this many correct guesses refute the claimed parameter."""
    return smallest_error(lambda error: too_many_correct(guesses, family, claimed, error))


@dataclass(frozen=True)
class GuessDesign:
    """The power of guesses on the canaries of one run, half of them "present" for the highest scores."""

    guesses: Guesses  # only their efficiency depends on how many were correct
    tradeoff: TradeOff
    delta: float
    error_rate: float
    lengths: tuple[float, ...] = (1.0,)  # the share of an ideal attack's signal
    normalized: bool = False

    def smallest_leak(self, claimed: float, probability: float = 0.8) -> float:
        """Return the smallest parameter that such guesses would detect with this probability."""

        def refutes(num_correct: int) -> bool:
            guesses = replace(self.guesses, num_correct=num_correct)
            return too_many_correct(guesses, self.tradeoff, claimed, self.error_rate)

        fewest = first_true_integer(refutes, 0, self.guesses.num_guesses)
        if fewest is None or not any(self.lengths):
            return math.inf

        def is_missed(excess: float) -> bool:
            attack = self._attack(claimed + excess)
            return guess_detection_rate(attack, self.guesses, fewest) < probability

        # nothing is hidden from a leak of 1,000 times the claim
        if is_missed(999 * claimed):
            return math.inf
        return claimed + last_true(is_missed, tolerance=1e-2)

    def _attack(self, parameter: float) -> Attack:
        return self.tradeoff.attack(parameter, self.delta, self.lengths)

    def efficiency(self, claimed: float, auc: float | None = None) -> float:
        """Return the share of an ideal attack's signal that the guesses show; their area does not matter."""
        del auc

        def falls_short(share: float) -> bool:
            correct = _simulated_correct(self.weakened(share)._attack(claimed), self.guesses)
            return bool(correct.mean() < self.guesses.num_correct)

        return signal_share(falls_short, tolerance=0.02)

    def weakened(self, efficiency: float) -> GuessDesign:
        """Return the design for guesses with this share of an ideal attack's signal."""
        return replace(self, lengths=(efficiency,))


def guess_detection_rate(attack: Attack, guesses: Guesses, fewest: int) -> float:
    """Simulate how often at least ``fewest`` guesses by the extreme scores of ``attack`` are correct."""
    return float((_simulated_correct(attack, guesses) >= fewest).mean())


def _simulated_correct(attack: Attack, guesses: Guesses) -> IntArray:
    """Simulate how many guesses by the extreme scores of ``attack`` are correct.

    Half of the guesses are "present", for the highest scores, and half are "absent", however many canaries
    are present: if those are far from half, some guesses are wrong even if the scores reveal everything.
    """
    rng, total = np.random.default_rng(4), guesses.num_canaries
    # 200 to 1,000 runs, of a million canaries in all
    shape = int(np.clip(1_000_000 / total, 200, 1000)), total
    present = rng.random(shape) < 0.5
    scores = np.where(present, attack.present_scores(rng.random(shape)), rng.standard_normal(shape))
    low = guesses.num_guesses // 2
    high = guesses.num_guesses - low
    order = np.argpartition(scores, sorted({max(low - 1, 0), min(total - high, total - 1)}), axis=1)
    truth = np.take_along_axis(present, order, axis=1)
    return np.asarray((~truth[:, :low]).sum(axis=1) + truth[:, total - high :].sum(axis=1))

"""Bounds from the guesses in one training run, valid even if its canaries are dependent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._binomial import binomial_cdf
from dpaudit.stats._bound import Bound
from dpaudit.stats._coins import FAIR
from dpaudit.stats._counts import Guesses
from dpaudit.stats._rootfinding import last_true
from dpaudit.stats._serialization import NamedPart
from dpaudit.stats.inference import Kind
from dpaudit.stats.tradeoffs import ApproximateDP, TradeOff
from dpaudit.stats.tradeoffs._attack import Attack

_FEW_WRONG = 10  # expected wrong guesses below which their number is not normal
_NEAR = 1e-2  # distance of the probit scores that determine the slope of a curve

_BEFORE = "the number of guesses was fixed before seeing the data"
_RELEASE_ALONE = (
    "which canaries were guessed, and the guesses, depend only on what the training run released, not on "
    "which canaries were present"
)


def one_run_bound(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> Bound:
    """Return the (eps, delta) bound of Steinke, Nasr and Jagielski 2023.

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
        raise InputError(f"Expected guesses to be Guesses(...), got {type(guesses).__name__}.")


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
        assumptions=(*((assumed,) if assumed else ()), FAIR, _RELEASE_ALONE, _BEFORE),
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


def guess_detection_rate(attack: Attack, guesses: Guesses, fewest: int) -> float:
    """Return the probability of at least ``fewest`` correct guesses by the extreme scores of ``attack``.

    Half of the guesses are "present", for the highest scores, and half are "absent". The thresholds between
    which no guess is made follow the scores, which the variance takes into account (Bahadur 1966).
    """
    total, half = guesses.num_canaries, guesses.num_guesses // 2
    shares = np.asarray([half, guesses.num_guesses - half]) / total
    low, high = attack.pooled_quantiles(np.asarray([shares[0], 1 - shares[1]]), 0.5)
    sides = (
        _GuessedSide.of(attack, float(high), float(shares[1]), present=True),
        _GuessedSide.of(attack, float(low), float(shares[0]), present=False),
    )
    right = sum(side.right for side in sides) / float(shares.sum())
    wrong = guesses.num_guesses * (1 - right)
    if wrong < _FEW_WRONG:
        return float(binomial_cdf(np.asarray(guesses.num_guesses - fewest), guesses.num_guesses, 1 - right))
    centered = sum(side.right * (1 - side.marginal) - side.wrong * side.marginal for side in sides)
    squares = sum(side.right * (1 - side.marginal) ** 2 + side.wrong * side.marginal**2 for side in sides)
    spread = math.sqrt(total * max(squares - centered**2, 0.0))
    return float(special.ndtr((guesses.num_guesses - wrong - fewest + 0.5) / max(spread, 1e-9)))


@dataclass(frozen=True)
class _GuessedSide:
    """Probabilities that a canary is guessed on this side, rightly and wrongly.

    ``marginal`` is the probability that the guess for the least extreme score is right.
    """

    right: float
    wrong: float
    marginal: float

    @classmethod
    def of(cls, attack: Attack, threshold: float, share: float, *, present: bool) -> _GuessedSide:
        """Return the probabilities if this ``share`` of all scores is beyond the threshold."""
        fpr, fnr = attack.rates(np.asarray([threshold, threshold + _NEAR]))
        wrong = min(float(fpr[0] if present else fnr[0]) / 2, share)
        missed, freed = max(float(fnr[1] - fnr[0]), 0.0), max(float(fpr[0] - fpr[1]), 0.0)
        is_present = missed / (missed + freed) if missed + freed > 0 else 0.5
        return cls(share - wrong, wrong, is_present if present else 1 - is_present)

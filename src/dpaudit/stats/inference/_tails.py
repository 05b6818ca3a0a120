"""Bets on rare but near-certain guesses, at scores far from the threshold.

Noise without tails, or a mechanism that occasionally reveals everything, hardly changes the balanced error,
but scores far from the threshold are then near-certain evidence. A curve limits such guesses: for every ratio
r and every test, the true positive rate exceeds r times the false positive rate by at most delta(ln r), the
delta at epsilon = ln r. A far guess that is right pays 1, and one that is wrong costs r.

A step stops at a number of wrong far guesses, like the stop-loss of the main bet. This bounds the loss, and
each canary's payoff is still a test: it depends on the released values and on the coins of other canaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.stats._counts import StepErrors, StepScores
from dpaudit.stats.inference._wealth import Schedule, Wealth, appended
from dpaudit.stats.rootfinding import last_true
from dpaudit.stats.tradeoffs import Gaussian

# How far from the other side's mean a score is, in standard deviations of the noise: just outside noise that
# is cut off at 2 or 3 standard deviations with its variance restored, and where hardly any score is expected.
_DISTANCES = 2.3, 3.1, 4.5
# mu up to which its inverse is finite, and from which on differences of its squares would be rounding errors
_TINIEST, _LEAKIEST = 1e-100, 1e6
# Fractions of the wealth that a step may lose, among which the stake is chosen; the largest of a first bet.
_FRACTIONS = np.asarray([0.8, 0.4, 0.2, 0.08, 0.03, 0.01, 0.003])

FarRates = tuple[FloatArray, FloatArray]
"""The rates of right and of wrong far guesses in each step, each summed over the two sides."""

Interval = tuple[float, float] | tuple[FloatArray, FloatArray]
"""The interval outside of which a score is far, for all steps or for each."""


@dataclass(frozen=True)
class FarGuess:
    """A guess at a far score: its distance in standard deviations, and its price if it is wrong."""

    distance: float
    ratio: float

    @classmethod
    def levels(cls, expected: float) -> tuple[FarGuess, ...]:
        """Return the far guesses for noise with this mu.

        >>> [round(one.ratio, 2) for one in FarGuess.levels(1.0)]
        [6.05, 13.46, 54.6]
        """
        expected = min(max(expected, _TINIEST), _LEAKIEST)
        # a right far guess is then at least 1.1 times as likely as a wrong one under the claim
        least = expected / 2 + math.log(1.1) / expected
        distances = sorted({max(distance, least) for distance in _DISTANCES})
        return tuple(cls(distance, math.exp(expected * distance - expected**2 / 2)) for distance in distances)

    def interval(self, expected: float) -> tuple[float, float]:
        """Return the interval outside of which a normalized score is far, for noise with this mu."""
        return 1 - self.distance / expected, self.distance / expected

    @property
    def rate(self) -> float:
        """The false positive rate of each side under Gaussian noise."""
        return float(special.ndtr(-self.distance))

    def allowed(self, parameter: float) -> float:
        """Return the largest mean payoff of a step under mu-GDP: that of both sides together."""
        return 2 * Gaussian().delta(parameter, math.log(self.ratio)) if parameter > 0 else 0.0


class TailBets:
    """Bets on the far guesses of one distance, given the rates of right and wrong ones in each step.

    Rates are sums over the two sides, so at most 2. ``size`` is the number of guesses per step. ``stops``
    states that a coin decided each presence and that guesses do not know other coins; otherwise there is no
    stop.
    """

    def __init__(
        self, far: FarGuess, *, expected: float, error: float, size: int, stops: bool, horizon: int | None
    ) -> None:
        self._far = far
        self._wealth, self._schedule = Wealth(error), Schedule(horizon)
        wrong = size * far.rate  # expected in a step
        self._most_wrong = (
            min(2 * max(math.ceil(wrong + 3 * math.sqrt(wrong)), 1) / size, 2.0) if stops else 2.0
        )
        self._allowed = far.allowed(expected)
        right = float(special.ndtr(expected - far.distance))
        # far scores of a tiny mu are too rare for floating-point numbers
        self._variance = max(4 * (right + far.ratio**2 * far.rate) / size, 1e-12)
        self._payoffs = np.empty(64)
        self._stake = 0.0

    def extend(self, right: FloatArray, wrong: FloatArray) -> None:
        """Add steps with these rates of right and wrong far guesses."""
        payoffs = np.where(wrong < self._most_wrong, right, 0.0)
        payoffs -= np.where(wrong <= self._most_wrong, self._far.ratio * wrong, 0.0)
        done = self._wealth.num_steps
        self._payoffs = appended(self._payoffs, done, payoffs)
        for start, end, is_due in self._schedule.blocks(done, done + payoffs.size):
            if is_due:
                self._stake = self._choose_stake(start)
            self._wealth.add(self._payoffs[start:end], loss=self._loss, stake=self._stake)

    @property
    def _loss(self) -> float:
        return self._far.ratio * self._most_wrong

    def _choose_stake(self, num_done: int) -> float:
        """Return the stake that would have grown most in the past and one worst step; small at first."""
        room = self._allowed + self._loss
        stakes = _FRACTIONS / room
        gains = self._payoffs[:num_done] - self._allowed
        grown = np.log1p(stakes[:, None] * gains).sum(axis=1) + np.log1p(-_FRACTIONS)
        best = float(stakes[int(grown.argmax())]) if grown.max() > 0 else 0.0
        ahead = self._schedule.expected_length(num_done)
        first = math.sqrt(2 * self._wealth.target / (self._variance * ahead))
        return max(best, min(first, 0.3 / room))

    def evidence(self, parameter: float) -> float:
        """Return by how much the log of the wealth exceeded its target against this parameter."""
        return self._wealth.evidence(max(self._far.allowed(parameter), 1e-12))

    def parameter(self, above: float, count: int | None = None) -> float:
        """Return the largest refuted parameter if it is larger than ``above``, otherwise ``above``."""
        if not self._wealth.evidence(max(self._far.allowed(above), 1e-12), count) > 0:
            return above
        mean = self._wealth.largest_refuted(count)
        return max(above, last_true(lambda p: self._far.allowed(p) < mean, max(above, 0.1)))


def far_rates(steps: StepScores, errors: StepErrors, intervals: Sequence[Interval]) -> list[FarRates]:
    """Return the rates of far guesses for each of these intervals, from the narrowest to the widest.

    ``errors`` has the sizes of each step.
    """
    sides = [
        _Side(steps.absent, steps.absent_step, _sizes(errors, errors.num_absent)),
        _Side(steps.present, steps.present_step, _sizes(errors, errors.num_present)),
    ]
    rates = []
    for interval in intervals:
        sides = [side.outside(interval) for side in sides]
        (absent_high, absent_low), (present_high, present_low) = (side.rates(interval) for side in sides)
        rates.append((present_high + absent_low, absent_high + present_low))
    return rates


def _sizes(errors: StepErrors, size: IntArray) -> FloatArray:
    """Return what rates refer to: half of the coins, or the size of the group."""
    return (errors.num_absent + errors.num_present) / 2 if errors.by_coin else size.astype(np.float64)


@dataclass(frozen=True)
class _Side:
    scores: ScoreArray
    steps: IntArray
    sizes: FloatArray

    def outside(self, interval: Interval) -> _Side:
        """Return the scores outside the interval; with every distance there are fewer."""
        low, high = (self._of_scores(end) for end in interval)
        indices = np.flatnonzero((self.scores > high) | (self.scores <= low))
        return _Side(self.scores[indices], self.steps[indices], self.sizes)

    def _of_scores(self, end: FloatArray | float) -> FloatArray | float:
        return end[self.steps] if isinstance(end, np.ndarray) else end

    def rates(self, interval: Interval) -> tuple[FloatArray, FloatArray]:
        """Return the rates of high and of low scores in each step."""
        high = np.asarray(self.scores > self._of_scores(interval[1]))
        counts = (
            np.bincount(self.steps[is_counted], minlength=self.sizes.size) for is_counted in (high, ~high)
        )
        above, below = (count / self.sizes for count in counts)
        return above, below

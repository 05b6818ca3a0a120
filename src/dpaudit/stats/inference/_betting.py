"""Betting against the claim, step by step (Waudby-Smith and Ramdas 2024).

Wealth that starts at 1 is bet, at every step, on fewer errors than the claim allows. Under the claim it
reaches 1 / error at any time with probability at most ``error``. Any stake that depends only on the
past keeps the game fair, so :func:`stakes` is free to seek growth: it targets a mean a little above the one
observed so far, which is where the bound will be, and spreads what the wealth still lacks over the remaining
steps (Voracek and Orabona 2025, "STaR-Bets"). It does not depend on the mean that is tested, so that
wealth grows with that mean and the refuted means are an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.stats._counts import StepErrors, StepScores
from dpaudit.stats._observations import Observations
from dpaudit.stats._rootfinding import last_positive
from dpaudit.stats.inference._base import BoundQuery, Inference, Kind, ThresholdResult

# The largest share of the wealth that one step may cost. All of it would end the game at one bad step.
MAX_LOSS = 0.99
_BOUND_OFFSET = 2.2  # standard errors of the final mean: roughly how far above the mean the bound will be
_BLOCKS = 64  # how often the stake is updated


@dataclass(frozen=True)
class Betting(Inference):
    """Bets that errors are rarer than the trade-off allows; enough wealth refutes it.

    The bet is on the balanced error (fpr + fnr) / 2 of each step, which is lossless at the threshold where
    both rates are equal. Valid at every moment, and when the canaries of one step depend on each other.
    (Bets on the two rates apart would not be: each rate may be low at a time of its own.) ``horizon`` is
    the number of steps that was planned; give it when the run may have been stopped early because of what
    it showed.
    """

    horizon: int | None = None
    kind: ClassVar[Kind] = Kind.CONFIDENCE

    def __post_init__(self) -> None:
        if self.horizon is not None:
            _validate.whole("horizon", self.horizon)

    def assumption(self, stepped: bool) -> str:
        if stepped:
            return "errors in a step do not depend on earlier steps; canaries within a step may be dependent"
        return "errors in an observation do not depend on earlier observations"

    def at_threshold(
        self, observations: Observations, threshold: float, query: BoundQuery
    ) -> ThresholdResult:
        steps = StepScores.of(observations)
        errors = steps.errors(np.full(steps.num_steps, threshold))
        return ThresholdResult(self.from_errors(errors, query), threshold, errors.total())

    def from_errors(self, errors: StepErrors, query: BoundQuery) -> float:
        """Return the largest refuted parameter, from the errors of every step in their order."""
        guesses = float((errors.num_absent + errors.num_present).mean())
        upper = upper_mean(errors.balanced(), query.error_rate, guesses, self.horizon)
        return query.tradeoff.from_balanced_error(upper)


def upper_mean(shares: FloatArray, error: float, guesses: float, horizon: int | None = None) -> float:
    """Return a mean that the shares refute: the wealth of betting on less reached 1/error at some step.

    ``guesses`` is how many guesses a share is made of; it only starts the estimate of their variance.

    >>> upper_mean(np.zeros(500), 0.05, 2) < 0.02
    True
    """
    bets = stakes(shares, error, guesses, horizon or shares.size)
    target = math.log(1 / error)

    def margin(rest: float) -> float:
        mean = 1 - rest
        # 1 + bet (mean - share) stays positive for shares up to 1, and grows with the mean
        capped = np.minimum(bets, MAX_LOSS / rest)
        return float(np.cumsum(np.log1p(capped * (mean - shares))).max()) - target

    return 1 - min(last_positive(margin, 0.5, tolerance=1e-9), 1.0)


def stakes(shares: FloatArray, error: float, guesses: float, horizon: int) -> FloatArray:
    """Return the bet of every step; ``guesses`` per share only start the estimate of the variance."""
    mean, variance = _running_moments(shares, guesses)
    target, wealth = math.log(1 / error), _WealthSums()
    bets = np.empty(shares.size)
    for start, end in _blocks(shares.size, horizon):
        tested = min(mean[start] + _BOUND_OFFSET * math.sqrt(variance[start] / horizon), 0.9)
        lacking = min(max(target - wealth.log_wealth(tested), target / 10), 3 * target)
        bet = stake(variance[start], lacking, max(horizon - start, 1))
        bets[start:end] = bet
        wealth.add(min(bet, MAX_LOSS / (1 - tested)), shares[start:end])
    return bets


def stake(variance: float, lacking: float, steps: int) -> float:
    """Return the bet under which the log of the wealth most surely grows by ``lacking`` in ``steps``."""
    return math.sqrt(2 * lacking / (variance * steps)) if variance > 0 else math.inf


def _running_moments(shares: FloatArray, guesses: float) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance before each step, started by those of independent fair guesses."""
    steps = np.arange(shares.size)
    after = (0.25 + np.cumsum(shares)) / (steps + 2)
    mean = np.concatenate([[0.25], after[:-1]])
    squares = np.concatenate([[0.0], np.cumsum((shares - after) ** 2)[:-1]])
    return mean, (0.25 / guesses + squares) / (steps + 1)


def _blocks(size: int, horizon: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps with one stake: short while little is known, then a 64th of the horizon."""
    start = 0
    while start < size:
        end = start + max(1, min(start // 2, horizon // _BLOCKS))
        yield start, min(end, size)
        start = end


class _WealthSums:
    """The sums from which the logarithm of the wealth, to second order, follows for any mean."""

    def __init__(self) -> None:
        self._first = np.zeros(2)
        self._second = np.zeros(3)

    def add(self, bet: float, shares: FloatArray) -> None:
        sums = np.asarray([shares.size, shares.sum(), shares @ shares])
        self._first += bet * sums[:2]
        self._second += bet**2 * sums

    def log_wealth(self, mean: float) -> float:
        gained = self._first[0] * mean - self._first[1]
        spread = self._second[0] * mean**2 - 2 * self._second[1] * mean + self._second[2]
        return float(gained - spread / 2)

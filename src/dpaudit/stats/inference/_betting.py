"""Testing by betting: bet against the claim, step by step (Waudby-Smith and Ramdas 2024).

Starting from a wealth of 1, every step bets on fewer errors than the claim allows. Under the claim, the
probability that the wealth ever reaches 1 / error is at most ``error``. Any stake that depends only on the
past keeps the game fair, so :func:`stakes` can be chosen for growth: it targets a mean slightly above the one
observed so far, which is where the bound will be, and spreads the growth that is still missing over the
remaining steps (Voracek and Orabona 2025, "STaR-Bets"). Stakes do not depend on the tested mean, so the
wealth increases with that mean and the refuted means form an interval.
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

# The largest fraction of the wealth that a step may lose. Losing all of it would end the game.
MAX_LOSS = 0.99
_BOUND_OFFSET = 2.2  # approximate distance of the bound from the mean, in standard errors of the final mean
_BLOCKS = 64  # number of updates of the stake


@dataclass(frozen=True)
class Betting(Inference):
    """Testing by betting: bets that errors are rarer than the trade-off allows; enough wealth refutes it.

    The bet is on the balanced error (fpr + fnr) / 2 of each step, which loses nothing at the threshold where
    both rates are equal. The bound is valid at any stopping time, and if the canaries within a step are
    dependent. (Separate bets on the two rates would not be valid: each rate may be low at different steps.)
    ``horizon`` is the planned number of steps; pass it if the run may have been stopped early because of its
    results.
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
        """Return the largest refuted parameter, given the errors of every step in order."""
        guesses = float((errors.num_absent + errors.num_present).mean())
        upper = upper_mean(errors.balanced(), query.error_rate, guesses, self.horizon)
        return query.tradeoff.from_balanced_error(upper)


def upper_mean(shares: FloatArray, error: float, guesses: float, horizon: int | None = None) -> float:
    """Return the smallest refuted mean: the bets against it reached a wealth of 1/error at some step.

    ``guesses`` is the number of guesses behind each share; it only initializes the variance estimate.

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
    """Return the stake of every step; ``guesses`` per share only initializes the variance estimate."""
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
    """Return the stake with the highest probability that log wealth grows by ``lacking`` in ``steps``."""
    return math.sqrt(2 * lacking / (variance * steps)) if variance > 0 else math.inf


def _running_moments(shares: FloatArray, guesses: float) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance before each step, initialized with those of independent fair guesses."""
    steps = np.arange(shares.size)
    after = (0.25 + np.cumsum(shares)) / (steps + 2)
    mean = np.concatenate([[0.25], after[:-1]])
    squares = np.concatenate([[0.0], np.cumsum((shares - after) ** 2)[:-1]])
    return mean, (0.25 / guesses + squares) / (steps + 1)


def _blocks(size: int, horizon: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps with the same stake: short at first, then 1/64 of the horizon."""
    start = 0
    while start < size:
        end = start + max(1, min(start // 2, horizon // _BLOCKS))
        yield start, min(end, size)
        start = end


class _WealthSums:
    """Sums that determine the log of the wealth, to second order, for any mean."""

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

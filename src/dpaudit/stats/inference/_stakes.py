"""How much to bet at each step, decided on the steps before it.

Any predictable stake keeps the game fair, so all here is for growth only. The stake aims at a mean a
little above the one seen so far, which is where the bound will be, and spreads what its wealth still
lacks over the steps that are left (Voracek and Orabona 2025, "STaR-Bets"). It does not depend on the
mean that is tested, so that wealth grows with that mean and the refuted means are an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dpaudit.stats._types import FloatArray

__all__ = ["MOST", "stake", "stakes"]

# The largest share of the wealth that one step may cost. All of it would end the game at one bad step.
MOST = 0.99
_ABOVE = 2.2  # deviations of the final mean: how far above the mean the bound will be, nearly
_BLOCKS = 64  # how often the stake is decided anew


def stake(variance: float, lacking: float, steps: int) -> float:
    """The bet under which the logarithm of the wealth grows by ``lacking`` most surely in ``steps``."""
    return math.sqrt(2 * lacking / (variance * steps)) if variance > 0 else math.inf


def stakes(shares: FloatArray, error: float, guesses: float, horizon: int) -> FloatArray:
    """The bet of every step; ``guesses`` a share only start the estimate of the variance."""
    mean, variance = _so_far(shares, guesses)
    target, past = math.log(1 / error), _Past()
    bets = np.empty(shares.size)
    for start, end in _blocks(shares.size, horizon):
        aim = min(mean[start] + _ABOVE * math.sqrt(variance[start] / horizon), 0.9)
        lacking = min(max(target - past.log_wealth(aim), target / 10), 3 * target)
        bet = stake(variance[start], lacking, max(horizon - start, 1))
        bets[start:end] = bet
        past.add(min(bet, MOST / (1 - aim)), shares[start:end])
    return bets


def _so_far(shares: FloatArray, guesses: float) -> tuple[FloatArray, FloatArray]:
    """Mean and variance before each step, started by those of independent guesses that err by halves."""
    steps = np.arange(shares.size)
    after = (0.25 + np.cumsum(shares)) / (steps + 2)
    mean = np.concatenate([[0.25], after[:-1]])
    squares = np.concatenate([[0.0], np.cumsum((shares - after) ** 2)[:-1]])
    return mean, (0.25 / guesses + squares) / (steps + 1)


def _blocks(size: int, horizon: int) -> Iterator[tuple[int, int]]:
    """Steps with one stake: short while little is known, then a 64th of the horizon."""
    start = 0
    while start < size:
        end = start + max(1, min(start // 2, horizon // _BLOCKS))
        yield start, min(end, size)
        start = end


class _Past:
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

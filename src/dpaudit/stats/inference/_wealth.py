"""The wealth of a bettor who bets, step by step, that payoffs exceed the mean that a claim allows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dpaudit._types import FloatArray
from dpaudit.stats.rootfinding import last_positive

MAX_LOSS = 0.99  # the largest fraction of the wealth that a step may lose; losing all of it ends the game


class Wealth:
    """The bets of all steps so far, and the wealth they have earned against any tested mean.

    In each step, the wealth is multiplied by 1 + stake (payoff - mean). A payoff is never below ``-loss``;
    the stake is limited so that a step loses at most ``MAX_LOSS`` of the wealth. The factor then decreases
    with the tested mean, limited or not.
    """

    def __init__(self, error: float) -> None:
        self.target = math.log(1 / error)
        self.num_steps = 0
        self._payoffs, self._losses, self._stakes = np.empty(64), np.empty(64), np.empty(64)

    def add(self, payoffs: FloatArray, *, loss: float, stake: float) -> None:
        """Add steps with these payoffs and the same bet."""
        done, size = self.num_steps, payoffs.size
        self._payoffs = appended(self._payoffs, done, payoffs)
        self._losses = appended(self._losses, done, np.full(size, loss))
        self._stakes = appended(self._stakes, done, np.full(size, stake))
        self.num_steps += size

    def logs(self, mean: float, count: int | None = None) -> FloatArray:
        """Return the log of the wealth after each of the first ``count`` steps, against this mean."""
        end = self.num_steps if count is None else count
        stakes = np.minimum(self._stakes[:end], MAX_LOSS / (mean + self._losses[:end]))
        return np.cumsum(np.log1p(stakes * (self._payoffs[:end] - mean)))

    def evidence(self, mean: float, count: int | None = None) -> float:
        """Return by how much the largest log of the wealth, 0 at first, exceeds its target."""
        return float(self.logs(mean, count).max(initial=0.0)) - self.target

    def largest_refuted(self, count: int | None = None) -> float:
        """Return the largest refuted mean, 0 if none."""
        if count == 0 or self.num_steps == 0:
            return 0.0

        return last_positive(lambda mean: self.evidence(mean, count), 0.2, tolerance=1e-9)


def appended(buffer: FloatArray, size: int, values: FloatArray) -> FloatArray:
    """Return a buffer that holds ``values`` after its first ``size`` ones; it grows by doubling."""
    end = size + values.size
    if end > buffer.size:
        buffer = np.concatenate([buffer[:size], np.empty(end)])
    buffer[size:end] = values
    return buffer


class Schedule:
    """The steps before which a bet is chosen, and the length that the run is then expected to have.

    Neither depends on the number of steps so far beyond the present one, so a bound is valid at any time.
    """

    def __init__(self, horizon: int | None) -> None:
        self._horizon = horizon
        self._next = 0

    def blocks(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Yield (start, end, whether to choose a bet before) of ranges of steps with the same bet."""
        while start < end:
            is_due = start >= self._next
            if is_due:
                # choose about 24 times during most of a run of known length
                longest = start if self._horizon is None else max(self._horizon // 24, start // 8)
                self._next = start + max(1, min(start // 3, longest))
            stop = min(self._next, end)
            yield start, stop, is_due
            start = stop

    def expected_length(self, num_done: int) -> int:
        """Return the number of steps to expect of a run with this number of steps so far."""
        if self._horizon is None:
            # expect 100 steps at first, then three times the present ones
            return max(100, int(3.0 * num_done))
        # a run that exceeds its horizon is expected to be a quarter longer than now
        return max(self._horizon, int(1.25 * num_done))

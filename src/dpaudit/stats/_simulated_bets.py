"""Bets on many simulated runs at once, which show how far below the truth the bound of a run ends up.

A bet is chosen from the steps before it, by an optimization that would take too long for every simulated run.
Runs with similar means so far therefore share the choice of one of them; only the stake differs. The bound is
below the mean advantage of its run by a distance that varies little and hardly depends on that mean, whose
distribution is known. So few runs suffice, and one simulation serves for leaks of similar sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.stats.inference._stop_loss import (
    AIM,
    LEAST,
    MOST,
    Bet,
    Forecast,
    StakeChoice,
    StopLosses,
    prior_steps,
    wanted_growth,
)
from dpaudit.stats.inference._wealth import MAX_LOSS, Schedule

_GROUPS = 8  # of runs with similar means
_BANDS = 2  # of runs in a group with a similar distance to the target
_HALVINGS = 24
_NEAR_LIMIT = 0.75  # stakes above this fraction of the wealth are at a limit, which depends on the bet only


@dataclass(frozen=True)
class BetDesign:
    """What the bets of a run depend on before its first step."""

    guesses: int  # per step
    stops: StopLosses
    error: float
    horizon: int | None
    expected: float | None  # advantage

    @property
    def target(self) -> float:
        """The log of the wealth that refutes a mean."""
        return math.log(1 / self.error)


class SimulatedBets:
    """The bets on several runs; ``advantages`` are runs x steps."""

    def __init__(self, design: BetDesign, advantages: FloatArray) -> None:
        self._design, self._advantages = design, advantages
        self._sums = np.cumsum(advantages, axis=1)
        shape = advantages.shape
        self._stakes, self._losses, self._payoffs = np.zeros(shape), np.ones(shape), np.zeros(shape)
        schedule = Schedule(design.horizon)
        bets = np.zeros((3, shape[0]))
        for start, end, is_due in schedule.blocks(0, shape[1]):
            if is_due:
                bets = self._choose(start, schedule.expected_length(start))
            stop, loss, stake = bets[:, :, None]
            block = advantages[:, start:end]
            self._payoffs[:, start:end] = np.where(block > stop, block, -loss)
            self._losses[:, start:end], self._stakes[:, start:end] = loss, stake

    def _choose(self, start: int, length: int) -> FloatArray:
        """Return stop, loss and stake of every run."""
        target = self._design.target
        groups = self._groups(start)
        choices = [self._choice(group, start) for group in groups]
        tested = np.empty(len(self._advantages))
        for group, choice in zip(groups, choices, strict=True):
            reachable = choice.reachable(AIM * target / length)
            tested[group] = np.clip(reachable + self._shifts(group, start), LEAST, MOST)
        growth = wanted_growth(self._logs(tested, start).sum(axis=1), target, length - start)
        bets = np.empty((3, tested.size))
        for group, choice in zip(groups, choices, strict=True):
            for band in np.array_split(group[np.argsort(growth[group], kind="stable")], _BANDS):
                if band.size:
                    middle = band[band.size // 2]
                    bet = choice.best(float(tested[middle]), float(growth[middle]))
                    stakes = _stakes(bet, float(tested[middle]), growth[band] / growth[middle])
                    bets[:, band] = np.full_like(stakes, bet.stop), np.full_like(stakes, bet.loss), stakes
        return bets

    def _groups(self, start: int) -> list[IntArray]:
        """Return runs with similar means before ``start``, in ascending order of their means."""
        numbers = np.arange(len(self._advantages))
        if start == 0:
            return [numbers]
        return np.array_split(np.argsort(self._sums[:, start - 1], kind="stable"), _GROUPS)

    def _choice(self, group: IntArray, start: int) -> StakeChoice:
        past = self._advantages[group[group.size // 2], :start]
        return StakeChoice(Forecast.of(past, self._design.guesses, self._design.expected), self._design.stops)

    def _shifts(self, group: IntArray, start: int) -> FloatArray:
        """Return how much higher the forecast of each run is than that of the run that stands for the group."""
        if start == 0:
            return np.zeros(group.size)
        sums = self._sums[group, start - 1]
        return np.asarray((sums - sums[group.size // 2]) / (prior_steps(self._design.expected) + start))

    def _logs(self, means: FloatArray, end: int) -> FloatArray:
        """Return the growth of the log of the wealth against a mean for each run, in each step."""
        tested, losses = means[:, None], self._losses[:, :end]
        stakes = np.minimum(self._stakes[:, :end], MAX_LOSS / (tested + losses))
        return np.log1p(stakes * (self._payoffs[:, :end] - tested))

    def refute(self, mean: FloatArray | float) -> BoolArray:
        """Return whether each run refutes this mean, or one of its own."""
        num_runs, num_steps = self._advantages.shape
        logs = self._logs(np.broadcast_to(mean, num_runs), num_steps)
        return np.asarray(np.cumsum(logs, axis=1).max(axis=1) > self._design.target)

    def refuted(self) -> FloatArray:
        """Return the largest mean that each run refutes."""
        num_runs = len(self._advantages)
        low, high = np.zeros(num_runs), np.ones(num_runs)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_refuted = self.refute(middle)
            low, high = np.where(is_refuted, middle, low), np.where(is_refuted, high, middle)
        return low

    def distances(self) -> FloatArray:
        """Return how far the bound of each run is below its mean advantage."""
        return np.asarray(self._advantages.mean(axis=1) - self.refuted())


def _stakes(bet: Bet, tested: float, ratios: FloatArray) -> FloatArray:
    """Return the stakes of runs that need the growth of this bet's run times ``ratios``."""
    if bet.stake * (tested + bet.loss) > _NEAR_LIMIT:
        return np.full_like(ratios, bet.stake)
    return np.asarray(bet.stake * np.sqrt(ratios))


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

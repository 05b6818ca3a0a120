"""Bets with a stop-loss: what the guesses of a step pay, and how much of the wealth to stake on them.

The advantage of a step is its fraction of right guesses minus its fraction of wrong ones. A mechanism whose
curve has total variation v gives it a mean of at most v. A bet on the advantage itself can lose its whole
stake in one step, which caps the stake however many canaries there are. With a stop-loss, a step whose
advantage is at most ``stop`` pays ``-loss`` instead, which is small for many canaries; docs/statistics.md
proves that the mean is still at most v, for independent fair coins and guesses that do not know the coins of
other canaries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from dpaudit._types import FloatArray
from dpaudit.stats.inference._wealth import Schedule, Wealth, appended

# Where stops are tried, in standard deviations of the advantage of pure guessing.
_STOPS = np.asarray([-3, -2, -1.2, -0.5, 0, 0.6, 1.2, 2, 3, 4.5, 7, 12, 20])
_FRACTIONS = np.asarray([0.99, 0.8, 0.5, 0.2])  # of the wealth that a bet may lose
_NODES = special.ndtri((np.arange(24) + 0.5) / 24)
_MOST_QUANTILES = 40  # of past steps in a forecast
LEAST, MOST = 1e-5, 0.9999  # total variations that are tried
AIM = 0.8  # the log wealth to aim for when choosing what to test, as a fraction of the target
_PSEUDO_STEPS = 4.0  # the weight of the spread that is expected before the first step
_CLAIM_WEIGHT = 3.0  # how much more the claimed advantage weighs than an assumed one


@dataclass(frozen=True)
class Bet:
    """A stake on the advantage of each of several steps, with a stop-loss."""

    stop: float
    loss: float
    stake: float

    def payoffs(self, advantages: FloatArray) -> FloatArray:
        """Return what steps with these advantages pay per unit of the stake."""
        return np.where(advantages > self.stop, advantages, -self.loss)


@dataclass(frozen=True)
class StopLosses:
    """The stops that a bet may use, in increasing order, and their losses."""

    stops: FloatArray
    losses: FloatArray

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, guesses: int) -> StopLosses:
        """Return the stops for this number of guesses per step; the first is no stop-loss at all.

        With w right guesses at the stop, the loss is C(K - 1, w) / (C(K, 0) + ... + C(K, w)): pure guessing
        then pays 0 on average. Stops are halfway between two possible advantages, so that rounding does not
        matter.

        >>> StopLosses.of(2)
        StopLosses(stops=array([-0.5,  0.5]), losses=array([1.        , 0.33333333]))
        """
        right = np.floor((guesses + _STOPS * math.sqrt(guesses)) / 2)
        right = np.unique(right[(right > 0) & (right < guesses)])
        stop_losses = cls(
            np.concatenate([[1 / guesses - 1], (2 * right + 1) / guesses - 1]),
            np.concatenate([[1.0], stop_loss(right, guesses)]),
        )
        for values in (stop_losses.stops, stop_losses.losses):
            values.flags.writeable = False  # they are shared
        return stop_losses

    @classmethod
    def none(cls) -> StopLosses:
        """Return only the bet without a stop-loss."""
        return cls(np.asarray([-2.0]), np.asarray([1.0]))  # no advantage is as low as the stop

    @classmethod
    def of_errors(cls) -> StopLosses:
        """Return the bet on fractions of wrong guesses, which are never negative."""
        return cls(np.asarray([-2.0]), np.asarray([0.0]))

    def payoffs(self, advantages: FloatArray) -> FloatArray:
        """Return the payoffs of each stop (rows) at these advantages."""
        losses = self.losses[:, None]
        return np.where(advantages > self.stops[:, None], np.maximum(advantages, -losses), -losses)


def stop_loss(right: FloatArray, guesses: int) -> FloatArray:
    """Return the loss of a stop at this number of right guesses."""
    log_pmf = (
        special.gammaln(guesses + 1)
        - special.gammaln(right + 1)
        - special.gammaln(guesses - right + 1)
        - guesses * math.log(2)
    )
    return np.asarray((1 - right / guesses) * np.exp(log_pmf) / special.bdtr(right, guesses, 0.5))


@dataclass(frozen=True)
class Forecast:
    """What the next steps' advantage may be: values and their probabilities."""

    values: FloatArray
    weights: FloatArray

    @classmethod
    def of(cls, past: FloatArray, guesses: int, expected: float | None) -> Forecast:
        """Combine past steps with independent guesses of the ``expected`` advantage.

        >>> forecast = Forecast.of(np.asarray([]), 100, expected=0.2)
        >>> round(float(forecast.values @ forecast.weights), 3)
        0.2
        """
        prior = prior_steps(expected)
        # without a claim, expect an advantage of 0.3
        center = 0.3 if expected is None else expected
        mean = (prior * center + float(past.sum())) / (prior + past.size)
        squares = float(((past - mean) ** 2).sum())
        variance = ((1 - mean**2) / guesses * _PSEUDO_STEPS + squares) / (_PSEUDO_STEPS + past.size)
        values, weights = _independent(mean, variance, guesses)
        if past.size >= 3:
            seen = past if past.size <= _MOST_QUANTILES else _quantiles(past)
            model = _CLAIM_WEIGHT * _PSEUDO_STEPS / (_CLAIM_WEIGHT * _PSEUDO_STEPS + past.size)
            values = np.concatenate([values, seen])
            weights = np.concatenate([model * weights, np.full(seen.size, (1 - model) / seen.size)])
        return cls(values, weights)


def prior_steps(expected: float | None) -> float:
    """Return the number of steps that a forecast's expected advantage weighs as much as."""
    return _PSEUDO_STEPS * (1.0 if expected is None else _CLAIM_WEIGHT)


def _independent(mean: float, variance: float, guesses: int) -> tuple[FloatArray, FloatArray]:
    if guesses <= 48:  # binomial instead of normal
        right = np.arange(guesses + 1)
        rate = min(max((1 + mean) / 2, 1e-6), 1 - 1e-6)
        weights = special.comb(guesses, right) * rate**right * (1 - rate) ** (guesses - right)
        return 2 * right / guesses - 1, weights
    values = np.clip(mean + math.sqrt(variance) * _NODES, -1.0, 1.0)
    return values, np.full(_NODES.size, 1 / _NODES.size)


def _quantiles(past: FloatArray) -> FloatArray:
    ordered = np.sort(past)
    places = ((np.arange(_MOST_QUANTILES) + 0.5) / _MOST_QUANTILES * past.size).astype(np.int64)
    return np.asarray(ordered[places])


class StakeChoice:
    """The choice of a bet for the forecast steps, among stops and fractions of the wealth.

    Any choice that depends on the past alone is valid; this one aims at the highest bound after a given
    number of steps.
    """

    def __init__(self, forecast: Forecast, stops: StopLosses) -> None:
        self._stops, self._weights = stops, forecast.weights
        self._payoffs = stops.payoffs(forecast.values)
        means = self._payoffs @ forecast.weights
        self._means = means
        self._variances = np.maximum((self._payoffs - means[:, None]) ** 2 @ forecast.weights, 1e-12)

    def reachable(self, growth: float) -> float:
        """Return the largest total variation against which the log of the wealth grows by ``growth`` a step.

        By Newton's method, for all stops and fractions at once.
        """
        free = np.sqrt(2 * growth / self._variances)[:, None]
        start = self._means - np.sqrt(2 * growth * self._variances) - growth * np.maximum(self._means, 1e-3)
        tested = np.repeat(np.clip(start, 1e-4, MOST)[:, None], _FRACTIONS.size, axis=1)
        for _ in range(5):
            excess, slope = self._excess(tested, free, growth)
            moved = tested + excess / np.maximum(slope, 1e-300)
            tested = np.clip(np.clip(moved, 0.3 * tested, np.maximum(3 * tested, 1e-4)), LEAST, MOST)
        excess, _ = self._excess(tested, free, growth)
        return float(np.where(excess >= -0.02 * growth, tested, LEAST).max())

    def _excess(self, tested: FloatArray, free: FloatArray, growth: float) -> tuple[FloatArray, FloatArray]:
        """Return growth above the wanted one, and how fast it falls with the tested total variation."""
        room = tested + self._stops.losses[:, None]
        limits = _FRACTIONS / room
        stakes = np.minimum(limits, free)
        payoffs = self._payoffs[:, None, :]
        factors = 1 + stakes[:, :, None] * (payoffs - tested[:, :, None])
        # a stake at its limit shrinks as the tested total variation grows
        falls = np.where(
            (limits < free)[:, :, None], (payoffs + self._stops.losses[:, None, None]) / room[:, :, None], 1.0
        )
        grown = np.log(factors) @ self._weights
        return grown - growth, (stakes[:, :, None] * falls / factors) @ self._weights

    def best(self, tested: float, growth: float) -> Bet:
        """Return the bet whose wealth grows fastest against ``tested``, to reach ``growth`` per step.

        Without limits, the stake that most probably grows the log of the wealth by a target is
        sqrt(2 target / (variance steps)) (Voracek and Orabona 2025, "STaR-Bets").
        """
        room = tested + self._stops.losses[:, None]
        free = np.sqrt(2 * growth / self._variances)[:, None]
        stakes = np.minimum(_FRACTIONS / room, free)
        grown = np.log1p(stakes[:, :, None] * (self._payoffs[:, None, :] - tested)) @ self._weights
        # a stake far from its limit is right as it is
        grown = np.where((stakes < free) & (free * room < 0.5), -np.inf, grown)
        stop, fraction = np.unravel_index(int(grown.argmax()), grown.shape)
        stops = self._stops
        return Bet(float(stops.stops[stop]), float(stops.losses[stop]), float(stakes[stop, fraction]))


def wanted_growth(earned: FloatArray, target: float, num_left: int) -> FloatArray:
    """Return the growth per step that the log of the wealth lacks, within limits that keep bets moderate."""
    return np.clip(target - earned, target / 10, 3 * target) / max(num_left, 1)


class AdvantageBets:
    """Bets on the advantage of every step of a run, with one of ``stops``.

    ``guesses`` per step; ``expected`` is the advantage that the claim leads to expect.
    """

    def __init__(
        self, guesses: int, *, stops: StopLosses, error: float, horizon: int | None, expected: float | None
    ) -> None:
        self._guesses, self._expected, self._stops = guesses, expected, stops
        self._wealth, self._schedule = Wealth(error), Schedule(horizon)
        self._advantages = np.empty(64)
        self._bet = Bet(-2.0, 1.0, 0.0)

    def extend(self, advantages: FloatArray) -> None:
        """Add steps with these advantages; a bet is chosen from the steps before it alone."""
        done = self._wealth.num_steps
        self._advantages = appended(self._advantages, done, advantages)
        for start, end, is_due in self._schedule.blocks(done, done + advantages.size):
            if is_due:
                self._bet = self._choose(start)
            payoffs = self._bet.payoffs(self._advantages[start:end])
            self._wealth.add(payoffs, loss=self._bet.loss, stake=self._bet.stake)

    def _choose(self, num_done: int) -> Bet:
        forecast = Forecast.of(self._advantages[:num_done], self._guesses, self._expected)
        choice = StakeChoice(forecast, self._stops)
        target, length = self._wealth.target, self._schedule.expected_length(num_done)
        tested = choice.reachable(AIM * target / length)
        earned = np.asarray(self._wealth.logs(tested)[-1] if num_done else 0.0)
        return choice.best(tested, float(wanted_growth(earned, target, length - num_done)))

    def refuted(self, count: int | None = None) -> float:
        """Return the largest total variation that the first ``count`` steps refute, at most 1."""
        return min(self._wealth.largest_refuted(count), 1.0)

    def evidence(self, mean: float) -> float:
        """Return by how much the log of the wealth exceeded its target against this total variation."""
        return self._wealth.evidence(mean)

"""Bets with a stop-loss: what the guesses of a step pay, and how much of the wealth to stake on them.

The advantage of a step is its fraction of right guesses minus its fraction of wrong ones. A mechanism whose
curve has total variation v gives it a mean of at most v. A bet on the advantage itself can lose its whole
stake in one step, which caps the stake however many canaries there are. With a stop-loss, a step whose
advantage is at most ``stop`` pays ``-loss`` instead, which is small for many canaries; docs/statistics.md
proves that the mean is still at most v, for independent fair coins and guesses that do not know the coins of
other canaries.

A bet is chosen from the steps before it, by an optimization that would take too long for every run that is
simulated for the power of an audit. Runs with similar means so far therefore share the choice of one of them;
only the stake differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from dpaudit._types import FloatArray
from dpaudit.stats.rootfinding import last_positive

# Where stops are tried, in standard deviations of the advantage of pure guessing.
_STOPS = np.asarray([-3, -2, -1.2, -0.5, 0, 0.6, 1.2, 2, 3, 4.5, 7, 12, 20])
_FRACTIONS = np.asarray([0.99, 0.8, 0.5, 0.2])  # of the wealth that a bet may lose
_NODES = special.ndtri((np.arange(24) + 0.5) / 24)
_MOST_QUANTILES = 40  # of past steps in a forecast
_LEAST, _MOST = 1e-5, 0.9999  # total variations that are tried
_AIM = 0.8  # the log wealth to aim for when choosing what to test, as a fraction of the target
_PSEUDO_STEPS = 4.0  # the weight of the spread that is expected before the first step
_CLAIM_WEIGHT = 3.0  # how much more the claimed advantage weighs than an assumed one
_REACH, _HALVINGS = 10.0, 11  # standard errors around the mean where a bound is looked for, and how long
_MAX_LOSS = 0.99  # the largest fraction of the wealth that a step may lose; losing all of it ends the game


@dataclass(frozen=True)
class Bet:
    """A stake on the advantage of each of several steps, with a stop-loss."""

    stop: float
    loss: float
    stake: float


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
        prior = _prior_steps(expected)
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


def _prior_steps(expected: float | None) -> float:
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
        tested = np.repeat(np.clip(start, 1e-4, _MOST)[:, None], _FRACTIONS.size, axis=1)
        for _ in range(5):
            excess, slope = self._excess(tested, free, growth)
            moved = tested + excess / np.maximum(slope, 1e-300)
            tested = np.clip(np.clip(moved, 0.3 * tested, np.maximum(3 * tested, 1e-4)), _LEAST, _MOST)
        excess, _ = self._excess(tested, free, growth)
        return float(np.where(excess >= -0.02 * growth, tested, _LEAST).max())

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


class Wealth:
    """The bets of all steps so far of one or more runs, and the wealth they earned against any tested mean.

    In each step, the wealth is multiplied by 1 + stake (payoff - mean). A payoff is never below ``-loss``;
    the stake is limited so that a step loses at most ``_MAX_LOSS`` of the wealth. The factor then decreases
    with the tested mean, limited or not.
    """

    def __init__(self, error: float, num_runs: int = 1) -> None:
        self.target = math.log(1 / error)
        self.num_steps = 0
        self._rows = np.empty((3, num_runs, 64))  # payoffs, losses and stakes

    @property
    def payoffs(self) -> FloatArray:
        """What all steps paid, runs x steps."""
        return self._rows[0, :, : self.num_steps]

    def add(self, payoffs: FloatArray, loss: FloatArray | float, stake: FloatArray | float) -> None:
        """Add steps with these payoffs, runs x steps, and the same bet for all of a run."""
        rows = np.stack(np.broadcast_arrays(payoffs, np.reshape(loss, (-1, 1)), np.reshape(stake, (-1, 1))))
        self._rows = appended(self._rows, self.num_steps, rows)
        self.num_steps += payoffs.shape[-1]

    def logs(self, mean: FloatArray | float, count: int | None = None) -> FloatArray:
        """Return the logs of the wealth after each of the first ``count`` steps, against one mean per run."""
        payoffs, losses, stakes = self._rows[:, :, : self.num_steps if count is None else count]
        tested = np.reshape(mean, (-1, 1))
        limited = np.minimum(stakes, _MAX_LOSS / (tested + losses))
        return np.cumsum(np.log1p(limited * (payoffs - tested)), axis=1)

    def evidence(self, mean: FloatArray | float, count: int | None = None) -> FloatArray:
        """Return by how much the largest log of the wealth of each run, 0 at first, exceeds its target."""
        return np.asarray(self.logs(mean, count).max(axis=1, initial=0.0) - self.target)

    def largest_refuted(self, count: int | None = None) -> float:
        """Return the largest mean that a single run refutes, 0 if none."""
        if count == 0 or self.num_steps == 0:
            return 0.0
        return last_positive(lambda mean: float(self.evidence(mean, count)[0]), 0.2, tolerance=1e-9)


def appended(buffer: FloatArray, size: int, values: FloatArray) -> FloatArray:
    """Return a buffer that holds ``values`` after its first ``size`` columns; it grows by doubling."""
    end = size + values.shape[-1]
    if end > buffer.shape[-1]:
        more = np.empty((*buffer.shape[:-1], end))
        buffer = np.concatenate([buffer[..., :size], more], axis=-1)
    buffer[..., size:end] = values
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


class AdvantageBets:
    """Bets on the advantage of every step of one or more runs, with one of ``stops``.

    ``guesses`` per step; ``expected`` is the advantage that the claim leads to expect.
    """

    def __init__(
        self,
        guesses: int,
        *,
        stops: StopLosses,
        error: float,
        horizon: int | None,
        expected: float | None,
        num_runs: int = 1,
    ) -> None:
        self._guesses, self._expected, self._stops = guesses, expected, stops
        self._wealth, self._schedule = Wealth(error, num_runs), Schedule(horizon)
        self._advantages = np.empty((num_runs, 64))
        self._bets = np.zeros((3, num_runs, 1))  # stop, loss and stake

    def extend(self, advantages: FloatArray) -> None:
        """Add steps with these advantages, (runs x) steps; a bet is chosen from the steps before it alone."""
        done = self._wealth.num_steps
        self._advantages = appended(self._advantages, done, advantages)
        for start, end, is_due in self._schedule.blocks(done, done + advantages.shape[-1]):
            if is_due:
                self._bets = self._choose(start)[:, :, None]
            stop, loss, stake = self._bets
            steps = self._advantages[:, start:end]
            self._wealth.add(np.where(steps > stop, steps, -loss), loss, stake)

    def _choose(self, num_done: int) -> FloatArray:
        """Return stop, loss and stake of every run."""
        past = self._advantages[:, :num_done]
        sums = np.cumsum(past, axis=1)[:, -1] if num_done else np.zeros(len(past))
        # runs with similar means so far share a choice; before the first step, all do
        order = np.argsort(sums, kind="stable")
        groups = [group for group in np.array_split(order, 8 if num_done else 1) if group.size]
        target, length = self._wealth.target, self._schedule.expected_length(num_done)
        choices, tested = [], np.empty(sums.size)
        for group in groups:
            middle = group[group.size // 2]
            forecast = Forecast.of(past[middle], self._guesses, self._expected)
            choices.append(StakeChoice(forecast, self._stops))
            shift = (sums[group] - sums[middle]) / (_prior_steps(self._expected) + num_done)
            tested[group] = np.clip(choices[-1].reachable(_AIM * target / length) + shift, _LEAST, _MOST)
        earned = self._wealth.logs(tested)[:, -1] if num_done else 0.0
        # the growth per step that is missing, within limits that keep bets moderate
        growth = np.clip(target - earned, target / 10, 3 * target) / max(length - num_done, 1)
        growth = np.broadcast_to(growth, tested.shape)
        bets = np.empty((3, tested.size))
        for group, choice in zip(groups, choices, strict=True):
            for band in np.array_split(group[np.argsort(growth[group], kind="stable")], 2):
                if band.size:
                    middle = band[band.size // 2]
                    bet = choice.best(float(tested[middle]), float(growth[middle]))
                    is_limited = bet.stake * (tested[middle] + bet.loss) > 0.75
                    ratios = np.ones(band.size) if is_limited else np.sqrt(growth[band] / growth[middle])
                    bets[:, band] = np.asarray([[bet.stop], [bet.loss], [bet.stake]])
                    bets[2, band] *= ratios
        return bets

    def refuted(self, count: int | None = None) -> float:
        """Return the largest total variation that the first ``count`` steps of a single run refute."""
        return min(self._wealth.largest_refuted(count), 1.0)

    def evidence(self, mean: FloatArray | float) -> FloatArray:
        """Return by how much the log of each run's wealth exceeded its target against a total variation."""
        return self._wealth.evidence(mean)

    def distances(self) -> FloatArray:
        """Return how far the largest refuted mean of each run is below its mean advantage, by bisection."""
        advantages = self._advantages[:, : self._wealth.num_steps]
        means = advantages.mean(axis=1)
        reach = _REACH * float(advantages.std()) / math.sqrt(advantages.shape[1])
        low, high = np.clip(means - reach, 0.0, 1.0), np.clip(means + reach, 0.0, 1.0)
        low = np.where(self.evidence(low) > 0, low, 0.0)
        high = np.where(self.evidence(high) > 0, 1.0, high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_refuted = self.evidence(middle) > 0
            low, high = np.where(is_refuted, middle, low), np.where(is_refuted, high, middle)
        return np.asarray(means - low)

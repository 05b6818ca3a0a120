"""Testing by betting: bet against the claim, step by step (Waudby-Smith and Ramdas 2024).

Starting from a wealth of 1, every step bets that guesses are right more often than the claim allows. Under
the claim, the probability that the wealth ever reaches 1 / error is at most ``error``. Any bet that depends
only on the past keeps the game fair, so bets are chosen for growth; ``_stop_loss`` has the main bet. Bets do
not depend on the tested parameter, beyond a limit on the stake, so the wealth decreases with it and the
refuted parameters form an interval.

A fraction of the error is bet on rare but near-certain guesses, at scores far from the threshold. Noise
without tails, or a mechanism that occasionally reveals everything, hardly changes the balanced error, but
scores far from the threshold are then near-certain evidence. A curve limits such guesses: for every ratio r
and every test, the true positive rate exceeds r times the false positive rate by at most delta(ln r), the
delta at epsilon = ln r. A far guess that is right pays 1, and one that is wrong costs r. A step stops at a
number of wrong far guesses, like the stop-loss of the main bet. This bounds the loss, and each canary's
payoff is still a test: it depends on the released values and on the coins of other canaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.stats._counts import ErrorCounts, StepErrors, StepScores, step_errors
from dpaudit.stats._observations import Observations
from dpaudit.stats.inference._base import BoundQuery, Inference, Kind, ThresholdResult
from dpaudit.stats.inference._stop_loss import AdvantageBets, Schedule, StopLosses, Wealth
from dpaudit.stats.rootfinding import last_true
from dpaudit.stats.tradeoffs import Gaussian

# assumptions, which docs/verdicts.md explains
_SINGLE = "each observation satisfies its curve given the earlier ones"
_UNINFORMED = "each guess depends on the released values, not on the presence of other canaries"
_STEPPED = (
    "each step satisfies its curve given the earlier steps and the presence of other canaries; scores within "
    "a step may be dependent"
)
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


@dataclass(frozen=True, repr=False)
class Betting(Inference):
    """Testing by betting: bets that errors are rarer than the trade-off allows; enough wealth refutes it.

    The bet is on the balanced error (fpr + fnr) / 2 of each step, which loses nothing at the threshold where
    both rates are equal. The bound is valid at any stopping time, and if the canaries within a step are
    dependent. (Separate bets on the two rates would not be valid: each rate may be low at different steps.)

    ``horizon`` is the planned number of steps: the bound is tightest there, and valid at any number.
    ``expected`` is the parameter that bets are tuned for; :func:`dpaudit.audit` passes the claimed one. The
    fraction ``tails`` of the error is bet on scores far from the threshold, which needs a Gaussian trade-off
    and an expected parameter. ``stop_loss=False`` is for guesses that depend on the presence of other
    canaries, such as scores from which the other canaries' contributions were subtracted.

    >>> Betting(horizon=500)
    Betting(horizon=500)
    """

    horizon: int | None = None
    expected: float | None = None
    tails: float = 0.1
    stop_loss: bool = True
    kind: ClassVar[Kind] = Kind.CONFIDENCE

    def __post_init__(self) -> None:
        if self.horizon is not None:
            # a file may claim any number of steps
            _validate.integer("horizon", self.horizon, high=(10**12))
        if self.expected is not None:
            _validate.at_least("expected", self.expected, 0.0)
        _validate.share("tails", self.tails)
        _validate.flag("stop_loss", self.stop_loss)

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        shown = ", ".join(f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"Betting({shown})"

    def assumption(self, observations: Observations | ErrorCounts, *, is_fixed: bool) -> str:
        del is_fixed  # any threshold that depends on the past alone
        if not isinstance(observations, Observations) or not observations.is_stepped:
            return _SINGLE
        # without coins there is no stop-loss
        return f"{_STEPPED}; {_UNINFORMED}" if self.stop_loss and observations.by_coin else _STEPPED

    def at_threshold(
        self, observations: Observations, threshold: float, query: BoundQuery
    ) -> ThresholdResult:
        intervals = self.far_intervals(query) if observations.normalized else []
        if observations.with_canary.ndim == 2 and not intervals:
            errors, far = step_errors(observations, threshold), []  # files stay on disk
        else:
            steps = StepScores.of(observations)
            errors = steps.errors(threshold)
            far = far_rates(steps, errors, intervals)
        bets = self.place(errors, query, far)
        return ThresholdResult(bets.parameter(), threshold, errors.total(), p_value=bets.p_value)

    def place(self, errors: StepErrors, query: BoundQuery, far: Sequence[FarRates] = ()) -> StepBets:
        """Bet on every step in order."""
        sizes = errors.num_absent + errors.num_present
        by_coin = errors.by_coin and bool((sizes == sizes[0]).all())
        bets = self.start(round(float(sizes.mean())), query, by_coin=by_coin, with_tails=bool(far))
        bets.extend(1 - 2 * errors.balanced(), far)
        return bets

    def far_intervals(self, query: BoundQuery) -> list[tuple[float, float]]:
        """Return the intervals outside of which a normalized score is far, the narrowest first."""
        return [guess.interval(self.expected or 0.0) for guess in self.far_guesses(query)]

    def far_guesses(self, query: BoundQuery) -> tuple[FarGuess, ...]:
        """Return the far guesses to bet on, none if the tails have no share of the error."""
        if not self.tails or not self.expected or not isinstance(query.tradeoff, Gaussian):
            return ()
        return FarGuess.levels(self.expected)

    def start(self, guesses: int, query: BoundQuery, *, by_coin: bool, with_tails: bool) -> StepBets:
        """Return bets without any step so far, for this number of guesses per step."""
        return StepBets(self, guesses, query, by_coin=by_coin, with_tails=with_tails)

    def main_bets(
        self, guesses: int, query: BoundQuery, *, by_coin: bool, with_tails: bool, num_runs: int = 1
    ) -> AdvantageBets:
        """Return the bets on the advantage of each step, with their share of the error."""
        share = self.tails if with_tails and self.far_guesses(query) else 0.0
        expected = self.expected
        return AdvantageBets(
            guesses,
            stops=StopLosses.of(guesses) if self.stop_loss and by_coin else StopLosses.none(),
            error=(1 - share) * query.error_rate,
            horizon=self.horizon,
            expected=None if expected is None else 1 - 2 * query.tradeoff.balanced_error(expected),
            num_runs=num_runs,
        )


class StepBets:
    """All bets of a run, to which steps may be added at any time."""

    def __init__(
        self, betting: Betting, guesses: int, query: BoundQuery, *, by_coin: bool, with_tails: bool
    ) -> None:
        self._tradeoff, self._error = query.tradeoff, query.error_rate
        self._main = betting.main_bets(guesses, query, by_coin=by_coin, with_tails=with_tails)
        far = betting.far_guesses(query) if with_tails else ()
        self._tails = [
            TailBets(
                guess,
                expected=betting.expected or 0.0,
                error=betting.tails * query.error_rate / len(far),
                size=guesses,
                stops=betting.stop_loss and by_coin,
                horizon=betting.horizon,
            )
            for guess in far
        ]

    def extend(self, advantages: FloatArray, far: Sequence[FarRates] = ()) -> None:
        """Add steps: fraction of right minus fraction of wrong guesses, and the rates of far guesses."""
        self._main.extend(advantages)
        for bets, (right, wrong) in zip(self._tails, far, strict=True):
            bets.extend(right, wrong)

    def parameter(self, count: int | None = None) -> float:
        """Return the largest parameter that the first ``count`` steps refute, by default all."""
        parameter = self._tradeoff.from_balanced_error((1 - self._main.refuted(count)) / 2)
        for bets in self._tails:
            parameter = bets.parameter(parameter, count)
        return parameter

    def p_value(self, claimed: float) -> float:
        """Return the smallest error rate at which the bets, as they were placed, refute ``claimed``.

        It is one over the largest wealth of any bet, divided by the share of the error that the bet has.
        """
        evidence = [float(self._main.evidence(1 - 2 * self._tradeoff.balanced_error(claimed))[0])]
        evidence += [bets.evidence(claimed) for bets in self._tails]
        return min(self._error * math.exp(-max(evidence)), 1.0)


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
        self._loss = far.ratio * self._most_wrong
        self._stake = 0.0

    def extend(self, right: FloatArray, wrong: FloatArray) -> None:
        """Add steps with these rates of right and wrong far guesses."""
        payoffs = np.where(wrong < self._most_wrong, right, 0.0)
        payoffs -= np.where(wrong <= self._most_wrong, self._far.ratio * wrong, 0.0)
        done = self._wealth.num_steps
        for start, end, is_due in self._schedule.blocks(done, done + payoffs.size):
            if is_due:
                self._stake = self._choose_stake(start)
            self._wealth.add(payoffs[None, start - done : end - done], self._loss, self._stake)

    def _choose_stake(self, num_done: int) -> float:
        """Return the stake that would have grown most in the past and one worst step; small at first."""
        room = self._allowed + self._loss
        stakes = _FRACTIONS / room
        gains = self._wealth.payoffs[0] - self._allowed
        grown = np.log1p(stakes[:, None] * gains).sum(axis=1) + np.log1p(-_FRACTIONS)
        best = float(stakes[int(grown.argmax())]) if grown.max() > 0 else 0.0
        ahead = self._schedule.expected_length(num_done)
        first = math.sqrt(2 * self._wealth.target / (self._variance * ahead))
        return max(best, min(first, 0.3 / room))

    def evidence(self, parameter: float, count: int | None = None) -> float:
        """Return by how much the log of the wealth exceeded its target against this parameter."""
        return float(self._wealth.evidence(max(self._far.allowed(parameter), 1e-12), count)[0])

    def parameter(self, above: float, count: int | None = None) -> float:
        """Return the largest refuted parameter if it is larger than ``above``, otherwise ``above``."""
        if not self.evidence(above, count) > 0:
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

"""The bound over time, from bets on the errors so far.

:class:`PlacedBets` are the bets of a run; :class:`LiveBound` is the bound after some steps, and
:class:`Trajectory` the bounds up to the last, with a band.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpaudit._types import BoolArray, FloatArray
from dpaudit.stats import Betting, Bound, Fixed, Inference
from dpaudit.stats._counts import StepErrors, StepScores
from dpaudit.stats._result import Hypothesis
from dpaudit.stats.inference import BoundQuery
from dpaudit.stats.inference._betting import StepBets
from dpaudit.stats.inference._stop_loss import AdvantageBets, StopLosses
from dpaudit.stats.inference._tails import FarRates, far_rates

_NUM_POINTS = 60  # more cannot be distinguished in a plot
_MANY_GUESSES = 1000  # how many guesses of a step to expect; the bets learn it within a few steps
_MIDPOINT = 0.5  # between an absent canary's mean score, 0, and a present one's, 1
_FAR = 2.0  # in units of the larger of claim and bound: outside every plot


class PlacedBets:
    """The bets on the steps of a run, which are placed in batches as steps are recorded."""

    def __init__(self, betting: Betting, query: BoundQuery, guesses: int, *, by_coin: bool) -> None:
        self.betting, self._query, self._by_coin = betting, query, by_coin
        with_tails = bool(betting.far_guesses(query))
        self.bets = betting.start(guesses, query, by_coin=by_coin, with_tails=with_tails)
        self._advantages: list[FloatArray] = []
        self._num_done = 0

    def completed(self, inference: Inference | None, *, is_same_curve: bool) -> Inference:
        """Return the inference, by default these bets; other bets get the horizon and tuning of these.

        Bets on another curve are not tuned yet, because its parameter means something else.
        """
        if not isinstance(inference, Betting | None):
            return inference
        mine = self.betting if is_same_curve else replace(self.betting, expected=None)
        if inference is None:
            return mine
        expected = mine.expected if inference.expected is None else inference.expected
        return replace(inference, horizon=inference.horizon or mine.horizon, expected=expected)

    def is_behind(self, bound: Bound) -> bool:
        """Return whether these bets give the bound, whatever its claim."""
        mine = self.betting, self._query.tradeoff, self._query.error_rate, Fixed(_MIDPOINT)
        return mine == (bound.inference, bound.tradeoff, 1 - bound.confidence, bound.threshold_rule)

    @property
    def advantages(self) -> FloatArray:
        """Fraction of right minus fraction of wrong guesses, in each step."""
        return np.concatenate(self._advantages)

    def extend(self, scores: Sequence[FloatArray], present: Sequence[BoolArray]) -> None:
        """Bet on the steps among all recorded ones that are new."""
        if len(scores) == self._num_done:
            return
        values, mask = np.stack(scores[self._num_done :]), np.stack(present[self._num_done :])
        errors = StepErrors.of(values, mask, _MIDPOINT, by_coin=self._by_coin)
        self._advantages.append(1 - 2 * errors.balanced())
        self.bets.extend(self._advantages[-1], self._far_rates(values, mask, errors))
        self._num_done = len(scores)

    def _far_rates(self, scores: FloatArray, present: BoolArray, errors: StepErrors) -> list[FarRates]:
        intervals = self.betting.far_intervals(self._query)
        if not intervals:
            return []
        far = StepScores.outside(scores, present, intervals[0], by_coin=self._by_coin)
        return far_rates(far, errors, intervals)

    def parameter(self, count: int) -> float:
        """Return the largest parameter that the first ``count`` steps refute."""
        return self.bets.parameter(count)


@dataclass(frozen=True, kw_only=True)
class LiveBound:
    """A lower bound; the bounds after any number of steps hold simultaneously.

    So the run may be stopped because of this bound.
    """

    num_done: int
    epsilon: float
    claimed_epsilon: float
    delta: float
    confidence: float
    is_violation: bool

    def __str__(self) -> str:
        relation = ">" if self.is_violation else "of"
        return f"epsilon >= {self.epsilon:.3g} {relation} {self.claimed_epsilon:.3g} claimed"


@dataclass(frozen=True, kw_only=True)
class TrajectoryPoint:
    """The evidence after ``num_done`` steps, as epsilons.

    ``epsilon`` is the lower bound. ``estimate`` is the leak that corresponds to the error rate so far; it is
    not a bound. ``upper`` bounds the leak visible to this attack from above; a better attack may reveal more.
    """

    num_done: int
    epsilon: float
    estimate: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Points from the first observations to the last.

    The lower bounds of all points hold simultaneously with the stated confidence. So do the upper ends, if
    the error rate did not change during the run. Both together hold with twice the error probability.
    """

    points: tuple[TrajectoryPoint, ...]
    confidence: float

    @classmethod
    def of(
        cls,
        bets: StepBets,
        advantages: FloatArray,
        *,
        hypothesis: Hypothesis,
        confidence: float,
        horizon: int | None,
        num_points: int = _NUM_POINTS,
        num_done: Sequence[int] | None = None,
    ) -> Trajectory:
        """Compute the points from the bets on the advantage (right minus wrong guesses) of each step.

        ``num_done`` are the numbers of steps after each bet, if there were also steps without bets.
        """
        hypothesis.epsilon(hypothesis.parameter)  # the accountant's table is built around the first query
        wrong = (1 - advantages) / 2
        opposite = AdvantageBets(
            _MANY_GUESSES, stops=StopLosses.of_errors(), error=1 - confidence, horizon=horizon, expected=None
        )
        opposite.extend(wrong)

        def point(count: int) -> TrajectoryPoint:
            refuted = bets.parameter(count)
            far = _FAR * max(refuted, hypothesis.parameter)
            return TrajectoryPoint(
                num_done=count if num_done is None else num_done[count - 1],
                epsilon=hypothesis.epsilon(refuted),
                estimate=_leak(hypothesis, float(wrong[:count].mean()), far),
                upper=_leak(hypothesis, opposite.refuted(count), far),
            )

        return cls(points=tuple(map(point, _counts(wrong.size, num_points))), confidence=confidence)


def _leak(hypothesis: Hypothesis, error: float, far: float) -> float:
    """Return the epsilon of a balanced error rate; infinite beyond ``far``, where accounting is slow."""
    if error <= 0:
        return math.inf
    parameter = hypothesis.tradeoff.from_balanced_error(min(error, 0.5))
    return hypothesis.epsilon(parameter) if parameter <= far else math.inf


def _counts(size: int, num_points: int) -> Iterable[int]:
    """Return ``num_points`` evenly spaced counts, including the last."""
    return sorted({int(count) for count in np.linspace(size, 1, min(size, num_points)).round()})

"""The bound over time, from bets on the errors so far.

:class:`RunBets` starts the bets of a run, :class:`PlacedBets`; :class:`LiveBound` is the bound after some
steps, and :class:`Trajectory` the bounds up to the last, with a band. :class:`ShownBounds` keeps track of
whether the run may have ended because of a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import ClaimSource
from dpaudit.stats import (
    Betting,
    Bound,
    Fixed,
    Hypothesis,
    Inference,
    Predictable,
    StepErrors,
    StepScores,
    ThresholdRule,
    TradeOff,
)
from dpaudit.stats.inference import AdvantageBets, BoundQuery, FarRates, StepBets, StopLosses, far_rates

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


class RunBets:
    """The bets of a run, which start before its first step, and the bounds with confidence ``level``."""

    def __init__(
        self,
        claims: ClaimSource,
        tradeoff: TradeOff | None,
        *,
        level: float,
        horizon: int | None,
        coupled: bool,
        by_coin: bool,
    ) -> None:
        self._claims, self._tradeoff, self.level = claims, tradeoff, level
        self._horizon, self._coupled, self._by_coin = horizon, coupled, by_coin
        self._betting: Betting | None = None  # chosen before the first step
        self._placed: PlacedBets | None = None

    def start(self, num_guesses: int) -> PlacedBets:
        """Start betting on steps with this number of guesses, once."""
        if self._placed is None:
            tradeoff, expected = self._claims.step_curve(self._tradeoff)
            if self._betting is None:  # otherwise that of a state
                self._betting = Betting(horizon=self._horizon, expected=expected, stop_loss=not self._coupled)
            query = BoundQuery(tradeoff, 0.0, 1 - self.level)  # the curve is already the one at delta
            self._placed = PlacedBets(self._betting, query, num_guesses, by_coin=self._by_coin)
        return self._placed

    def placed(self, scores: Sequence[FloatArray], present: Sequence[BoolArray]) -> PlacedBets:
        """Bet on all recorded steps; a bet that is placed does not change."""
        placed = self.start(scores[0].size)
        placed.extend(scores, present)
        return placed

    def bound(
        self, scores: Sequence[FloatArray], present: Sequence[BoolArray], count: int, claim: Claim
    ) -> LiveBound:
        """Return the bound after the first ``count`` of the recorded steps."""
        hypothesis = claim.hypothesis(self._tradeoff)
        parameter = self.placed(scores, present).parameter(count) if count else 0.0
        return LiveBound(
            num_done=count,
            epsilon=hypothesis.epsilon(parameter),
            claimed_epsilon=claim.epsilon,
            delta=claim.delta,
            confidence=self.level,
            is_violation=parameter > hypothesis.parameter,
        )

    def trajectory(self, placed: PlacedBets, hypothesis: Hypothesis, num_done: Sequence[int]) -> Trajectory:
        """Return the bound over time behind placed bets, on the steps with these numbers."""
        return Trajectory.of(
            placed.bets,
            placed.advantages,
            hypothesis=hypothesis,
            confidence=self.level,
            horizon=placed.betting.horizon,
            num_done=num_done,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the method and confidence of the bets; empty before the first step."""
        if self._betting is None:
            return {}
        return {"betting": self._betting.to_dict(), "confidence": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bet from now on with the method and confidence of a state."""
        betting = Betting.from_dict(state["betting"]) if "betting" in state else None
        if not isinstance(betting, Betting | None):
            raise InputError(f"Expected the state of a recorder, which bets, got {betting!r}.")
        self._betting, self._placed = betting, None
        self.level = _validate.confidence(state.get("confidence", self.level))


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


class ShownBounds:
    """Whether bounds of a run were shown, and whether the run may have ended because of one."""

    def __init__(self, planned: int | None) -> None:
        self._planned = planned
        self.is_closed = False  # whether the run was marked as over
        self.any = False
        self.early = False  # whether one was shown before the end

    def note_step(self) -> None:
        """Note that the run continues: if a bound was shown, it was before the end, and may be the reason."""
        self.early, self.is_closed = self.early or self.any, False

    def note(self, num_done: int) -> None:
        """Note that a bound is shown; unless the run is over, it may be ended because of that."""
        self.any = True
        self.early = self.early or not self.is_over(num_done)

    def is_over(self, num_done: int) -> bool:
        """Return whether the run has ended."""
        return self.is_closed or num_done == self._planned

    def is_last(self, num_done: int) -> bool:
        """Return whether no audit with tests can follow, on more steps; a run that is over may continue."""
        return self._planned is None or num_done > self._planned or self.is_over(num_done)

    def may_have_stopped(self, num_done: int) -> bool:
        """Return whether the number of steps may depend on the scores."""
        return self.early and num_done != self._planned

    def require_stoppable(
        self, inference: Inference | None, rule: ThresholdRule | None, num_done: int
    ) -> None:
        """Raise on a method that needs a number of steps that does not depend on the scores."""
        if not self.may_have_stopped(num_done):
            return
        is_inference = not isinstance(inference, Betting | None)
        if is_inference or not isinstance(rule, Fixed | Predictable | None):
            method = inference if is_inference else rule
            problem = f"{method!r} would not have its stated error rate. Use Betting(), pass"
            raise InputError(self.stopped(problem, num_done))

    def stopped(self, problem: str, num_done: int) -> str:
        """Return the message of an error: what the possible end because of a bound makes impossible."""
        planned = self._planned
        ends = "a run of unplanned length" if planned is None else f"{num_done} of {planned} steps"
        return (
            f"Expected a number of steps that does not depend on the scores, got {ends} and a bound that was "
            f"shown before the end: {problem} num_steps= to the observer and run all of them, or show the "
            "bound only after the end."
        )


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

"""Scores of single steps: bets on which canaries are present, and a bound that holds at any time.

:class:`PerStep` is the scorer, :class:`PlacedBets` are its bets, :class:`LiveBound` is the bound after some
steps, and :class:`Trajectory` the bounds up to the last, with a band.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import ReadClaim, TrainingInfo, claimed_noise
from dpaudit.recording._joint_verdict import ScoreSummary
from dpaudit.recording._score_log import (
    CanaryLengths,
    LengthMoments,
    ObservedCanaries,
    ScoreLog,
    check_signal,
    has_signal,
)
from dpaudit.stats import (
    STEP,
    Betting,
    Bound,
    CoinCheck,
    Fixed,
    Hypothesis,
    Inference,
    Observations,
    Result,
    StepErrors,
    StepScores,
    TradeOff,
    as_flags,
    audit_recorded,
    audit_untuned,
    plain_array,
    scale_notes,
    split_by_coins,
)
from dpaudit.stats.inference import AdvantageBets, BoundQuery, FarRates, StepBets, StopLosses, far_rates

_SCORE_BYTES = 2 * (8 + 1)  # a score and its presence, as recorded and as joined for the audit
_NUM_POINTS = 60  # more cannot be distinguished in a plot
_MANY_GUESSES = 1000  # how many guesses of a step to expect; the bets learn it within a few steps
_FAR = 2.0  # in units of the larger of claim and bound: outside every plot
_PENDING = 64  # steps that are recorded before bets are placed on them
_MIDPOINT = 0.5  # between an absent canary's mean score, 0, and a present one's, 1
_CHOSEN = "this method was chosen before any bound of the run was shown"


@final
class PerStep:
    """Scorer of single steps, in units of the canary's own signal, by bets on every one of them.

    ``paired``: each step has one score without the canary and one with it, from two independent draws,
    instead of one fair coin per canary. ``coupled``: a score depends on which other canaries were present, as
    after subtracting those that overlap with it. A present canary must score ``signal`` or more, otherwise
    there is no verdict. Scores are in units of ``reach`` clipping norms, less than 1 if canaries do not reach
    all layers. What arrives of ``canaries`` is tested.
    """

    covers_sampling: ClassVar[bool] = False
    has_live_bound: ClassVar[bool] = True

    def __init__(
        self,
        *,
        tradeoff: TradeOff | None = None,
        paired: bool = False,
        coupled: bool = False,
        signal: float | None = None,
        reach: float = 1.0,
        num_canaries: int | None = None,
        canaries: ObservedCanaries | None = None,
    ) -> None:
        self._tradeoff, self._paired, self._coupled, self._signal = tradeoff, paired, coupled, signal
        self._num_canaries = None if num_canaries is None else _validate.integer("num_canaries", num_canaries)
        self._log = ScoreLog(canaries)
        self._lengths = CanaryLengths(signal=1.0 if signal is None else signal, reach=reach)

    def begin(self, claims: ReadClaim, level: float, planned: int | None) -> None:
        """Score a run from its first step on, for bounds with confidence ``level``.

        All ``planned`` steps must fit into memory, which is checked when the number of canaries is known.
        """
        self._claims, self.level, self._planned = claims, level, planned
        self._require_memory(self._num_canaries)
        self._log.clear()
        self._coins = CoinCheck()
        self._betting: Betting | None = None  # chosen before the first step
        self._placed: PlacedBets | None = None

    def _require_memory(self, num_canaries: int | None) -> None:
        if self._planned is not None and num_canaries is not None:
            _validate.fits_memory(
                f"The scores of num_steps={self._planned} x num_canaries={num_canaries}",
                _SCORE_BYTES * self._planned * num_canaries,
            )

    @property
    def num_done(self) -> int:
        """The number of recorded steps."""
        return len(self._log)

    @property
    def num_canaries(self) -> int | None:
        """The number of scores per step, if it is known."""
        return self._log.scores[0].size if len(self._log) else self._num_canaries

    @property
    def checks(self) -> tuple[ScoreLog, ...]:
        """Tests of the scores besides the bound."""
        return (self._log,)

    @property
    def has_tests(self) -> bool:
        """Whether these tests have anything to test."""
        return self._log.is_tested

    def record(self, scores: Any, present: Any, lengths: FloatArray | None) -> None:
        """Add the scores of a step, and which canaries were present."""
        values, mask = np.array(plain_array("scores", scores), dtype=np.float64), as_flags(present)
        if not len(self._log):
            self._require_memory(values.size)
        self._log.add(values, mask)
        self._start_bets()
        if lengths is not None:
            self._lengths.add(lengths)
        if len(self._log) % _PENDING == 0:
            self._bets()

    def _start_bets(self) -> PlacedBets:
        """Start betting with what is known before the first step, once."""
        if self._placed is None:
            tradeoff, expected = self._claims.step_curve(self._tradeoff)
            if self._betting is None:  # otherwise that of a state
                horizon = None if self._planned is None else self._log.num_counted(self._planned)
                self._betting = Betting(horizon=horizon, expected=expected, stop_loss=not self._coupled)
            query = BoundQuery(tradeoff, 0.0, 1 - self.level)  # the curve is already the one at delta
            num_guesses = self._log.counted_scores[0].size
            self._placed = PlacedBets(self._betting, query, num_guesses, by_coin=not self._paired)
        return self._placed

    def _bets(self) -> PlacedBets:
        """Bet on all recorded steps; a bet that is placed does not change."""
        placed = self._start_bets()
        placed.extend(self._log.counted_scores, self._log.counted_present)
        return placed

    def require_fair(self, *, is_over: bool) -> None:
        """Raise if the coins so far are very unlikely to be fair."""
        if self._paired:
            return
        if new := self._log.counted_present[self._coins.num_steps :]:
            self._coins.add(np.stack(new))
        self._coins.require_fair(is_over=is_over)

    def require_signal(self, claim: Claim, *, is_accepted: bool = False) -> None:
        """Raise if canaries do not reach the release, so that no verdict can rest on their scores."""
        if self._signal is not None:  # if a claim is accepted, nothing else speaks for those that count
            moments = [LengthMoments.of(*self._log.counted())] if is_accepted else self._log.moments()
            check_signal(moments, self._signal, claimed_noise=claimed_noise(claim))

    def has_signal(self) -> bool:
        """Return whether canaries score as expected."""
        return self._signal is None or has_signal(self._log.moments(), self._signal)

    def observations(self, claim: Claim | None = None) -> Observations:
        """Return all scores that count for the bound."""
        del claim
        scores, present = self._log.counted()
        if self._paired:
            return Observations.from_presence(scores, present, normalized=True, paired=True, scores_of=STEP)
        coupled = self._coupled and scores.shape[1] > 1
        return split_by_coins(scores, present, normalized=True, coupled=coupled)

    def judge(
        self, observations: Observations, claim: Claim, method: dict[str, Any], *, was_shown: bool
    ) -> Result:
        """Return the result of the bound alone."""
        method = {"tradeoff": self._tradeoff, "inference": None} | method
        placed, is_same_curve = self._bets(), method["tradeoff"] == self._tradeoff
        method["inference"] = placed.completed(method["inference"], is_same_curve=is_same_curve)
        # bets on another curve are tuned for it, placed bets stay as they are
        judge = audit_untuned if is_same_curve else audit_recorded
        result = judge(observations, claim=claim, **method)
        if was_shown and not placed.is_behind(result.bound):
            assumptions = *result.bound.assumptions, _CHOSEN
            result = replace(result, bound=replace(result.bound, assumptions=assumptions))
        if self._signal is not None:  # below 1 for canaries shorter than the clipping norm
            result = replace(result, notes=scale_notes(observations, self._signal))
        return replace(result, design=self._lengths.in_design(result.design))

    def clues(self, claim: object, facts: TrainingInfo | None) -> dict[str, Any]:
        """Return what the scores show of the cause of a violation."""
        noise = claimed_noise(claim)
        clues = ScoreSummary.of(*self._log.counted(), facts).known(noise)
        if self._log.is_tested and noise is not None:  # a test of each shape and length knows more
            clues = {name: clue for name, clue in clues.items() if "signal" not in name}
        return clues

    def bound(self, num_done: int, claim: Claim) -> LiveBound:
        """Return the bound after this number of steps."""
        hypothesis, count = claim.hypothesis(self._tradeoff), self._log.num_counted(num_done)
        parameter = self._bets().bets.parameter(count) if count else 0.0
        return LiveBound(
            num_done=num_done,
            epsilon=hypothesis.epsilon(parameter),
            claimed_epsilon=claim.epsilon,
            delta=claim.delta,
            confidence=self.level,
            is_violation=parameter > hypothesis.parameter,
        )

    def trajectory(self, claim: Claim) -> Trajectory:
        """Return the bound over time."""
        placed = self._bets()
        return Trajectory.of(
            placed.bets,
            placed.advantages,
            hypothesis=claim.hypothesis(self._tradeoff),
            confidence=self.level,
            horizon=placed.betting.horizon,
            num_done=self._log.step_numbers(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the scores and the method of the bets."""
        return {
            "scores": np.asarray(self._log.scores),
            "present": np.asarray(self._log.present),
            "lengths": self._lengths.counts,
            "betting": None if self._betting is None else self._betting.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, after ``begin``."""
        betting = None if state["betting"] is None else Betting.from_dict(state["betting"])
        if not isinstance(betting, Betting | None):
            raise InputError(f"The state is not that of a recorder, which bets: got {betting!r}.")
        self._betting = betting
        self._log.load(state["scores"], state["present"], self._num_canaries)
        self._lengths.counts = np.array(state["lengths"])


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
        reached = _validate.rounded_down(self.epsilon)
        return f"epsilon >= {reached} {relation} {_validate.rounded(self.claimed_epsilon)} claimed"


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

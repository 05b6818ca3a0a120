"""The bound over time: :class:`Trajectory` are the bounds up to the last step, with a band.

:class:`ShownBounds` keeps track of whether the run may have ended because of a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dpaudit._types import FloatArray
from dpaudit.errors import InputError
from dpaudit.stats import Betting, Fixed, Hypothesis, Inference, Predictable, ThresholdRule
from dpaudit.stats.inference import AdvantageBets, StepBets, StopLosses

_NUM_POINTS = 60  # more cannot be distinguished in a plot
_MANY_GUESSES = 1000  # how many guesses of a step to expect; the bets learn it within a few steps
_FAR = 2.0  # in units of the larger of claim and bound: outside every plot


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

"""The bound over time, from bets on the errors so far.

:class:`LiveBound` is the bound after some steps, :class:`Trajectory` the bounds up to the last, with a band.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpaudit._types import FloatArray
from dpaudit.stats._result import Hypothesis
from dpaudit.stats.inference._betting import StepBets
from dpaudit.stats.inference._stop_loss import AdvantageBets, StopLosses

_NUM_POINTS = 60  # more cannot be distinguished in a plot
_MANY_GUESSES = 1000  # how many guesses of a step to expect; the bets learn it within a few steps
_FAR = 2.0  # in units of the larger of claim and bound: outside every plot


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
    ) -> Trajectory:
        """Compute the points from the bets on the advantage (right minus wrong guesses) of each step."""
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
                num_done=count,
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

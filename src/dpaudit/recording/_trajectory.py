"""The bound over time: what bets on the errors say at each moment of a run.

:class:`LiveBound` is the bound at one moment, :class:`Trajectory` the bounds up to the last one, with a band.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpaudit._types import FloatArray
from dpaudit.stats._result import Hypothesis
from dpaudit.stats.inference._betting import upper_mean

_NUM_POINTS = 60  # more cannot be distinguished in a plot
_FAR = 2.0  # in units of the larger of claim and bound: beyond every picture


@dataclass(frozen=True, kw_only=True)
class LiveBound:
    """A lower bound that holds at this and at every other moment of the run, all together.

    So the run may be stopped because of what it says.
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
    """What was known after ``num_done`` steps, as epsilons.

    ``epsilon`` is the lower bound. ``estimate`` is the leak that the errors so far stand for, and is not a
    bound. ``upper`` is where the leak that this attack shows would end; a better attack may show more.
    """

    num_done: int
    epsilon: float
    estimate: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Points from the first observations to the last.

    The lower bounds of all points hold together, with the stated confidence, and so do the upper ends, if
    the error rate did not change meanwhile; both together with twice the error.
    """

    points: tuple[TrajectoryPoint, ...]
    confidence: float

    @classmethod
    def of(
        cls,
        shares: FloatArray,
        *,
        hypothesis: Hypothesis,
        confidence: float,
        guesses: float,
        horizon: int,
        num_points: int = _NUM_POINTS,
    ) -> Trajectory:
        """Compute it from the share of wrong guesses of every step; ``horizon`` steps were planned.

        The last lower bound is the one by ``Betting(horizon)``.
        """
        error = 1 - confidence
        hypothesis.epsilon(hypothesis.parameter)  # the accountant's table is made around the first query

        def point(count: int) -> TrajectoryPoint:
            seen = shares[:count]
            refuted = hypothesis.tradeoff.from_balanced_error(upper_mean(seen, error, guesses, horizon))
            far = _FAR * max(refuted, hypothesis.parameter)
            return TrajectoryPoint(
                num_done=count,
                epsilon=hypothesis.epsilon(refuted),
                estimate=_leak(hypothesis, float(seen.mean()), far),
                upper=_leak(hypothesis, 1 - upper_mean(1 - seen, error, guesses, horizon), far),
            )

        return cls(points=tuple(map(point, _counts(shares.size, num_points))), confidence=confidence)


def _leak(hypothesis: Hypothesis, error: float, far: float) -> float:
    """Return the epsilon of a balanced error; infinite beyond ``far``, where accounting takes long."""
    if error <= 0:
        return math.inf
    parameter = hypothesis.tradeoff.from_balanced_error(min(error, 0.5))
    return hypothesis.epsilon(parameter) if parameter <= far else math.inf


def _counts(size: int, num_points: int) -> Iterable[int]:
    """Return ``num_points`` counts, evenly spaced, the last one among them."""
    return sorted({int(count) for count in np.linspace(size, 1, min(size, num_points)).round()})

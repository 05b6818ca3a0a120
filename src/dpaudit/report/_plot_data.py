"""The numbers behind the plots of a report.

:class:`PlotData` holds the data that the observations of a run provide: a histogram of the scores (a report
shows no individual score), the plane of the two error rates, and the bound over time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit import stats
from dpaudit._types import FloatArray, IntArray
from dpaudit.recording import Trajectory
from dpaudit.stats.inference import BoundQuery, far_rates
from dpaudit.stats.thresholds import predictable_bets

_HUGE = 1e150  # differences of scores have to be finite


@dataclass(frozen=True, kw_only=True)
class PlotData:
    """The numbers of each plot; None if the run lacks the data.

    ``of_verdict`` states that the verdict's own bound is the last point of the trajectory.
    """

    scores: Histogram | None = None
    plane: stats.ErrorRatePlane | None = None
    course: Trajectory | None = None
    of_verdict: bool = False

    @classmethod
    def of(
        cls,
        observations: stats.Observations | None,
        bound: stats.Bound,
        hypothesis: stats.Hypothesis | None,
        *,
        in_order: bool = True,
    ) -> PlotData:
        """Compute the data of the plots. ``in_order`` states that observations are in temporal order."""
        course = _trajectory(observations, hypothesis, bound) if in_order else None
        return cls(
            scores=None if observations is None else Histogram.of(observations, bound.threshold),
            plane=None if hypothesis is None else _plane(hypothesis, bound),
            course=course,
            of_verdict=course is not None and _ends_at(course, bound),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "scores": None if self.scores is None else self.scores.to_dict(),
            "tradeoff": None if self.plane is None else _plane_values(self.plane),
            "course": None if self.course is None else _trajectory_values(self.course),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """The number of scores of either side in each bin; the outermost bins include all scores beyond them."""

    edges: FloatArray
    with_canary: IntArray
    without_canary: IntArray
    threshold: float | None

    @classmethod
    def of(cls, observations: stats.Observations, threshold: float | None) -> Histogram:
        """Count scores in bins of equal width that cover nearly all scores."""
        sides = [
            np.clip(np.asarray(side, dtype=np.float64).reshape(-1), -_HUGE, _HUGE)
            for side in (observations.with_canary, observations.without_canary)
        ]
        low, high = _range(sides)
        edges = np.linspace(low, high, _bins(sides) + 1)
        present, absent = (np.histogram(np.clip(side, low, high), edges)[0] for side in sides)
        return cls(edges=edges, with_canary=present, without_canary=absent, threshold=threshold)

    def share(self, counts: IntArray) -> FloatArray:
        """Return the counts of one side as fractions of all its scores."""
        return np.asarray(counts / counts.sum())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "edges": self.edges.tolist(),
            "with_canary": self.with_canary.tolist(),
            "without_canary": self.without_canary.tolist(),
            "threshold": self.threshold,
        }


def _range(sides: list[FloatArray]) -> tuple[float, float]:
    """Return the range of the plot: all of up to 200 scores per side, else all but 0.05 % at either end."""
    ends = [
        (side.min(), side.max()) if side.size <= 200 else np.quantile(side, (0.0005, 1 - 0.0005))
        for side in sides
    ]
    low, high = float(min(end[0] for end in ends)), float(max(end[1] for end in ends))
    # identical scores still need a bin
    return (low, high) if high - low > 1e-9 * max(abs(low), abs(high), 1e-300) else (low - 0.5, high + 0.5)


def _bins(sides: list[FloatArray]) -> int:
    """Return the number of bins: from 6 for few scores to 48."""
    return max(6, min(48, round(2 * math.sqrt(min(side.size for side in sides)))))


def _plane(hypothesis: stats.Hypothesis, bound: stats.Bound) -> stats.ErrorRatePlane | None:
    if not isinstance(bound.counts, stats.ErrorCounts) or not 0 <= hypothesis.parameter < math.inf:
        return None
    return stats.ErrorRatePlane.of(
        bound.counts,
        tradeoff=hypothesis.tradeoff,
        claimed=hypothesis.parameter,
        bound=bound.parameter,
        confidence=bound.confidence,
    )


def _plane_values(plane: stats.ErrorRatePlane) -> dict[str, Any]:
    return {
        "fpr": plane.fpr.tolist(),
        "claimed_fnr": plane.claimed.tolist(),
        "bound_fnr": plane.bound.tolist(),
        "measured": {"fpr": plane.counts.fpr, "fnr": plane.counts.fnr},
        "region": {"fpr": list(plane.region[0]), "fnr": list(plane.region[1])},
        "region_confidence": plane.confidence,
    }


def _trajectory(
    observations: stats.Observations | None, hypothesis: stats.Hypothesis | None, bound: stats.Bound
) -> Trajectory | None:
    """Bet at the fixed threshold; without one, at thresholds chosen from earlier observations."""
    if observations is None or hypothesis is None:
        return None
    steps = stats.StepScores.of(observations)
    if steps.num_steps < 2:  # nothing to draw a line through
        return None
    inference, query = bound.inference, BoundQuery(hypothesis.tradeoff, bound.delta, 1 - bound.confidence)
    betting = (
        inference if isinstance(inference, stats.Betting) else stats.Betting(expected=hypothesis.parameter)
    )
    rule = bound.threshold_rule
    if isinstance(rule, stats.BestOf):
        rule = rule.rules[0]
    if isinstance(rule, stats.Fixed):
        errors = steps.errors(rule.threshold)
        # files do not store whether scores are normalized, but only those have this threshold
        intervals = betting.far_intervals(query) if rule == stats.Fixed() else []
        bets = betting.place(errors, query, far_rates(steps, errors, intervals))
    else:
        errors, bets = predictable_bets(steps, betting, query)[1:]
    return Trajectory.of(
        bets,
        1 - 2 * errors.balanced(),
        hypothesis=hypothesis,
        confidence=bound.confidence,
        horizon=betting.horizon,
    )


def _ends_at(course: Trajectory, bound: stats.Bound) -> bool:
    """Return whether the last point is the bound, which it is only if the bound was betted on."""
    last = course.points[-1].epsilon
    return isinstance(bound.inference, stats.Betting) and math.isclose(last, bound.epsilon, rel_tol=1e-3)


def _trajectory_values(trajectory: Trajectory) -> dict[str, Any]:
    points = trajectory.points
    return {
        "num_done": [point.num_done for point in points],
        "epsilon": [stats.plain(point.epsilon) for point in points],
        "estimate": [stats.plain(point.estimate) for point in points],
        "upper": [stats.plain(point.upper) for point in points],
        "confidence": trajectory.confidence,
    }

"""All pictures that a run has the numbers for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dpaudit.recording import Course
from dpaudit.report._bounds import BoundValues, ClaimValues
from dpaudit.report._rebuild import planned_steps
from dpaudit.report.figures._course import course_of
from dpaudit.report.figures._histogram import Histogram
from dpaudit.stats import Observations, TradeOff
from dpaudit.stats._bound import plain
from dpaudit.stats._claim import Hypothesis
from dpaudit.stats._plane import Plane

__all__ = ["Figures"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Each is None where the run does not hold what it needs.

    ``of_verdict`` says that the verdict's own bound is the last point of the course.
    """

    scores: Histogram | None = None
    plane: Plane | None = None
    course: Course | None = None
    of_verdict: bool = False

    @classmethod
    def of(
        cls,
        observations: Observations | None,
        *,
        claim: ClaimValues,
        bound: BoundValues,
        tradeoff: TradeOff | None,
        hypothesis: Hypothesis | None,
        in_order: bool = True,
    ) -> Figures:
        """What can be drawn. ``in_order`` says that the observations were made one after the other."""
        scores = None if observations is None else Histogram.of(observations, bound.threshold)
        course = None
        if observations is not None and hypothesis is not None and in_order:
            course = course_of(
                observations,
                hypothesis=hypothesis,
                threshold=_fixed(bound.rule),
                confidence=bound.confidence,
                horizon=planned_steps(bound.inference),
            )
        return cls(
            scores=scores,
            plane=_plane(claim, bound, tradeoff),
            course=course,
            of_verdict=bound.inference.startswith("Betting("),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "scores": None if self.scores is None else self.scores.to_dict(),
            "tradeoff": None if self.plane is None else _plane_values(self.plane),
            "course": None if self.course is None else _course_values(self.course),
        }


def _fixed(rule: str) -> float | None:
    """The threshold that was chosen before the data, if there was one."""
    found = re.match(r"Fixed\(threshold=(-?[\d.]+(?:e-?\d+)?)\)", rule)
    return float(found[1]) if found else None


def _plane(claim: ClaimValues, bound: BoundValues, tradeoff: TradeOff | None) -> Plane | None:
    if tradeoff is None or bound.counts is None or not 0 <= claim.parameter < float("inf"):
        return None
    return Plane.of(
        bound.counts,
        tradeoff=tradeoff,
        claimed=claim.parameter,
        bound=bound.parameter,
        confidence=bound.confidence,
    )


def _plane_values(plane: Plane) -> dict[str, Any]:
    return {
        "fpr": plane.fpr.tolist(),
        "claimed_fnr": plane.claimed.tolist(),
        "bound_fnr": plane.bound.tolist(),
        "measured": {"fpr": plane.counts.fpr, "fnr": plane.counts.fnr},
        "region": {"fpr": list(plane.region[0]), "fnr": list(plane.region[1])},
        "region_confidence": plane.confidence,
    }


def _course_values(course: Course) -> dict[str, Any]:
    moments = course.moments
    return {
        "num_done": [one.num_done for one in moments],
        "epsilon": [plain(one.epsilon) for one in moments],
        "estimate": [plain(one.estimate) for one in moments],
        "upper": [plain(one.upper) for one in moments],
        "confidence": course.confidence,
    }

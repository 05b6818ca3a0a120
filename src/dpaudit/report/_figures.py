"""The numbers behind the pictures of a report.

All pictures that a run has the numbers for. The bound after more and more observations. Scores in bins: a
report holds how many there are, and no single one. The curve and the claim of a run again, from the words
that it keeps; nothing of it is evaluated.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit._types import FloatArray, IntArray
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.recording import Course
from dpaudit.report._values import BoundValues, ClaimValues, Values
from dpaudit.stats import ApproximateDP, Gaussian, Laplace, Observations, PureDP, RandomizedResponse, TradeOff
from dpaudit.stats._bound import plain
from dpaudit.stats._counts import StepErrors, Steps
from dpaudit.stats._result import Hypothesis, Plane
from dpaudit.stats.thresholds._rules import predictable_thresholds

_FEWEST = 2


def course_of(
    observations: Observations,
    *,
    hypothesis: Hypothesis,
    threshold: float | None,
    confidence: float,
    horizon: int | None,
) -> Course | None:
    """By bets at a threshold that was fixed; without one, at what the observations before each choose."""
    steps = Steps.of(observations)
    if steps.num_steps < _FEWEST:
        return None
    errors = _errors(steps, threshold)
    shares = errors.balanced()
    return Course.of(
        shares,
        hypothesis=hypothesis,
        confidence=confidence,
        guesses=float((errors.num_absent + errors.num_present).mean()),
        horizon=horizon or shares.size,
    )


def _errors(steps: Steps, threshold: float | None) -> StepErrors:
    if threshold is None:
        return steps.errors(predictable_thresholds(steps)).after_first()
    return steps.errors(np.full(steps.num_steps, threshold))


_KNOWN: dict[str, Callable[..., TradeOff]] = {
    one.__name__: one
    for one in (ApproximateDP, Gaussian, Laplace, PureDP, RandomizedResponse, SubsampledGaussian)
}
# of a curve that is composed for a picture
_MOST_STEPS = 10**6
_LEAST_NOISE, _MOST_NOISE = 0.1, 1000.0
_LEAST_RATE = 1e-7


def rebuilt_tradeoff(text: str) -> TradeOff | None:
    """The trade-off of this name with these numbers; None if it is not a known one.

    >>> rebuilt_tradeoff("SubsampledGaussian(sample_rate=0.1, num_steps=50)").num_steps
    50
    >>> rebuilt_tradeoff("__import__('os')")
    """
    try:
        called = ast.parse(text, mode="eval").body
        if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name) or called.args:
            return None
        values = {str(word.arg): ast.literal_eval(word.value) for word in called.keywords}
        return _made(called.func.id, values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # also what a number is not
        return None


def _made(name: str, values: dict[str, Any]) -> TradeOff | None:
    make = _KNOWN.get(name)
    small = values.get("num_steps", 1) <= _MOST_STEPS and not values.get("num_lines")
    return make(**values) if make is not None and small else None


def rebuilt_hypothesis(values: Values, tradeoff: TradeOff | None, claimed: float) -> Hypothesis | None:
    """What the claim of a run of DP-SGD says of one observation; None if that cannot be known."""
    terms = ("noise_multiplier", "sample_rate", "num_steps", "delta")
    if tradeoff is None or not all(values.has(term) for term in terms):
        return None
    if values.whole("num_steps") > _MOST_STEPS or not _is_usual(values):
        return None
    try:
        claim = Claim.dpsgd(
            noise_multiplier=values.number("noise_multiplier"),
            sample_rate=values.number("sample_rate"),
            num_steps=values.whole("num_steps"),
            delta=values.number("delta"),
        )
        found = claim.hypothesis(tradeoff)
    except InputError:
        return None
    # another claim would be another picture
    return found if math.isclose(found.parameter, claimed, rel_tol=1e-6) else None


def _is_usual(values: Values) -> bool:
    """Whether the accountant takes no longer than for the trainings of people."""
    return _LEAST_NOISE <= values.number("noise_multiplier") <= _MOST_NOISE and (
        values.number("sample_rate") >= _LEAST_RATE
    )


def planned_steps(inference: str) -> int | None:
    """The horizon of ``Betting(horizon=...)``; None of everything else."""
    found = re.fullmatch(r"Betting\(horizon=(\d{1,9})\)", inference)
    return int(found[1]) if found else None


_BINS = 48
_ALL = 200  # so many scores a side may all be in the picture; of more, some lie far out
_TAIL = 0.0005
_HUGE = 1e150  # differences of scores have to be numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """How many scores of either side are in each bin; what lies outside is in the first and last one."""

    edges: FloatArray
    with_canary: IntArray
    without_canary: IntArray
    threshold: float | None

    @classmethod
    def of(cls, observations: Observations, threshold: float | None) -> Histogram:
        """Bins of equal width over nearly all scores."""
        sides = [
            np.clip(np.asarray(side, dtype=np.float64).reshape(-1), -_HUGE, _HUGE)
            for side in (observations.with_canary, observations.without_canary)
        ]
        low, high = _range(sides)
        edges = np.linspace(low, high, _bins(sides) + 1)
        found = [np.histogram(np.clip(side, low, high), edges)[0] for side in sides]
        return cls(edges=edges, with_canary=found[0], without_canary=found[1], threshold=threshold)

    def share(self, counts: IntArray) -> FloatArray:
        """Of all scores of the side, those in each bin."""
        return np.asarray(counts / counts.sum())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "edges": self.edges.tolist(),
            "with_canary": self.with_canary.tolist(),
            "without_canary": self.without_canary.tolist(),
            "threshold": self.threshold,
        }


def _range(sides: list[FloatArray]) -> tuple[float, float]:
    ends = [
        (side.min(), side.max()) if side.size <= _ALL else np.quantile(side, (_TAIL, 1 - _TAIL))
        for side in sides
    ]
    low, high = float(min(end[0] for end in ends)), float(max(end[1] for end in ends))
    # scores that are all the same still need a bin
    return (low, high) if high - low > 1e-9 * max(abs(low), abs(high), 1e-300) else (low - 0.5, high + 0.5)


def _bins(sides: list[FloatArray]) -> int:
    """Fewer where there is little to count."""
    fewest = min(side.size for side in sides)
    return max(6, min(_BINS, round(2 * math.sqrt(fewest))))


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

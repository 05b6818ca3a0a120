"""Bounds of counts and scores as rows, under the names of the paper.

Scores of the Gaussian mechanism without the scores: their counts, in memory that does not grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray
from dpaudit.experiments.reproduction._figure import Row
from dpaudit.stats import (
    ApproximateDP,
    ClopperPearson,
    ErrorCounts,
    Gaussian,
    Inference,
    JointExact,
    KatzLog,
    Kind,
    Posterior,
    PureDP,
    TradeOff,
    lower_bound,
)
from dpaudit.stats._bound import plain
from dpaudit.stats.inference import BoundQuery

DELTA = 1e-5
CONFIDENCE = 0.95
METHODS: Mapping[str, tuple[TradeOff, Inference]] = {
    "f-DP(CP)": (Gaussian(), ClopperPearson()),
    "f-DP(ZB)": (Gaussian(), Posterior()),
    "(eps,delta)(CP)": (ApproximateDP(), ClopperPearson()),
    "(eps,delta)(ZB)": (ApproximateDP(), Posterior()),
    "eps-DP(Katz)": (PureDP(), KatzLog()),
    "f-DP(joint)": (Gaussian(), JointExact()),
    "(eps,delta)(joint)": (ApproximateDP(), JointExact()),
}


def count_row(method: str, rule: str, counts: ErrorCounts) -> Row:
    """The bound of counts at a threshold that was chosen before the data."""
    tradeoff, inference = METHODS[method]
    delta = 0.0 if isinstance(inference, KatzLog) else DELTA
    bound = lower_bound(counts, delta=delta, confidence=CONFIDENCE, tradeoff=tradeoff, inference=inference)
    return {"method": method, "rule": rule, "kind": str(bound.kind), "epsilon": plain(bound.epsilon)}


def best_row(method: str, false_positives: IntArray, false_negatives: IntArray, number: int) -> Row:
    """The largest of Clopper and Pearson's bounds at many thresholds: the paper's practice, not a bound."""
    tradeoff, inference = METHODS[method]
    assert isinstance(inference, ClopperPearson)
    query = BoundQuery(tradeoff.at(DELTA), DELTA, 1 - CONFIDENCE)
    sizes = ErrorCounts.perfect(number, number)
    parameter = float(np.max(inference.rank(false_positives, false_negatives, sizes, query)))
    epsilon = query.tradeoff.epsilon(parameter, DELTA)
    return {
        "method": method,
        "rule": "best on the same data",
        "kind": str(Kind.HEURISTIC),
        "epsilon": plain(epsilon),
    }


@dataclass(frozen=True, eq=False)
class Counted:
    """Errors of ``number`` scores on either side, at each of the thresholds."""

    number: int
    false_positives: IntArray
    false_negatives: IntArray

    def at(self, place: int) -> ErrorCounts:
        """Those at one threshold."""
        return ErrorCounts(
            false_positives=int(self.false_positives[place]),
            num_absent=self.number,
            false_negatives=int(self.false_negatives[place]),
            num_present=self.number,
        )


def counted(
    numbers: Sequence[int], thresholds: FloatArray, noise: float, rng: np.random.Generator
) -> Iterator[Counted]:
    """One growing sample of N(0, noise^2) and N(1, noise^2), looked at when it has each of these sizes.

    How many scores lie between two thresholds is multinomial: drawing that is drawing the scores.
    """
    edges = [special.ndtr((thresholds - middle) / noise) for middle in (0.0, 1.0)]
    shares = [np.diff(np.concatenate([[0.0], edge, [1.0]])) for edge in edges]
    below = [np.zeros(thresholds.size, dtype=np.int64) for _ in shares]
    done = 0
    for number in numbers:
        for side, share in enumerate(shares):
            below[side] = below[side] + rng.multinomial(number - done, share)[:-1].cumsum()
        done = number
        yield Counted(number, number - below[0], below[1])


def log_spaced(low: int, high: int, number: int) -> list[int]:
    """Whole numbers, evenly spaced on a logarithmic scale.

    >>> log_spaced(10, 1000, 3)
    [10, 100, 1000]
    """
    return [int(value) for value in np.unique(np.geomspace(low, high, number).round().astype(np.int64))]


def nearest(sizes: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Of the sizes those that are nearest to what is wanted, by their ratio.

    >>> nearest([10, 90, 800], [100, 1000])
    [90, 800]
    """
    return sorted({min(sizes, key=lambda size: abs(np.log(size / one))) for one in wanted})

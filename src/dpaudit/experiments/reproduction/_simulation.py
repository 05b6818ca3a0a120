"""Simulate the Gaussian mechanism by sampling error counts instead of scores, and compute bounds.

Memory does not grow with the number of scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray
from dpaudit.experiments.reproduction._figure import Row
from dpaudit.methods import COUNT_METHODS
from dpaudit.stats import Bound, ClopperPearson, ErrorCounts, Gaussian, Kind, lower_bound
from dpaudit.stats.inference import BoundQuery

DELTA = 1e-5
CONFIDENCE = 0.95


def step_noise(epsilon: float) -> float:
    """Return the noise multiplier of one Gaussian step with this epsilon."""
    return 1 / Gaussian().with_epsilon(epsilon, DELTA)


def count_bound(method: str, counts: ErrorCounts, confidence: float = CONFIDENCE) -> Bound:
    """Return the bound of a registered method, with the Gaussian curve if the method accepts any curve."""
    tradeoff, inference = COUNT_METHODS[method]
    return lower_bound(
        counts, delta=DELTA, confidence=confidence, tradeoff=tradeoff or Gaussian(), inference=inference
    )


def count_row(method: str, rule: str, counts: ErrorCounts) -> Row:
    """Return the bound from counts at a threshold that was fixed before the data."""
    bound = count_bound(method, counts)
    return {"method": method, "rule": rule, "kind": str(bound.kind), "epsilon": bound.to_dict()["epsilon"]}


def best_row(method: str, false_positives: IntArray, false_negatives: IntArray, number: int) -> Row:
    """Return the largest Clopper-Pearson bound over many thresholds: the paper's practice, a heuristic."""
    tradeoff, inference = COUNT_METHODS[method]
    assert isinstance(inference, ClopperPearson)
    query = BoundQuery((tradeoff or Gaussian()).at(DELTA), DELTA, 1 - CONFIDENCE)
    sizes = ErrorCounts.perfect(number, number)
    parameter = float(np.max(inference.rank(false_positives, false_negatives, sizes, query)))
    epsilon = query.tradeoff.epsilon(parameter, DELTA)
    return {
        "method": method,
        "rule": "best on the same data",
        "kind": str(Kind.HEURISTIC),
        "epsilon": "inf" if np.isinf(epsilon) else epsilon,
    }


@dataclass(frozen=True, eq=False)
class CountsByThreshold:
    """Error counts of ``number`` scores per side, at each of the thresholds."""

    number: int
    false_positives: IntArray
    false_negatives: IntArray

    def at(self, index: int) -> ErrorCounts:
        """Return the counts at one threshold."""
        return ErrorCounts(
            false_positives=int(self.false_positives[index]),
            num_absent=self.number,
            false_negatives=int(self.false_negatives[index]),
            num_present=self.number,
        )


def simulate_counts(
    numbers: Sequence[int], thresholds: FloatArray, noise: float, rng: np.random.Generator
) -> Iterator[CountsByThreshold]:
    """Yield the counts of one growing sample of N(0, noise^2) and N(1, noise^2) at each of these sizes.

    The numbers of scores between thresholds are multinomial, so that no score has to be sampled.
    """
    edges = [special.ndtr((thresholds - middle) / noise) for middle in (0.0, 1.0)]
    shares = [np.diff(np.concatenate([[0.0], edge, [1.0]])) for edge in edges]
    below = [np.zeros(thresholds.size, dtype=np.int64) for _ in shares]
    done = 0
    for number in numbers:
        for side, share in enumerate(shares):
            below[side] = below[side] + rng.multinomial(number - done, share)[:-1].cumsum()
        done = number
        yield CountsByThreshold(number, number - below[0], below[1])


def log_spaced(low: int, high: int, number: int) -> list[int]:
    """Return integers evenly spaced on a logarithmic scale.

    >>> log_spaced(10, 1000, 3)
    [10, 100, 1000]
    """
    return [int(value) for value in np.unique(np.geomspace(low, high, number).round().astype(np.int64))]


def nearest(sizes: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return the available sizes nearest to the wanted ones in ratio.

    >>> nearest([10, 90, 800], [100, 1000])
    [90, 800]
    """
    return sorted({min(sizes, key=lambda size: abs(np.log(size / number))) for number in wanted})

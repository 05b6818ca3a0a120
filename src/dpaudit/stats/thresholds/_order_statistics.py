"""Thresholds at scores of given ranks, where the distribution of one error rate is known.

The fpr at an absent score of a given rank is a Beta order statistic, whatever the distribution of the scores.
Given the absent scores the threshold is fixed, so the false negatives at it are binomial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray, ScoreArray
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations, chunks, require_finite
from dpaudit.stats.inference import (
    BoundQuery,
    ClopperPearson,
    ExactInference,
    Inference,
    JointExact,
    RankInference,
    ThresholdResult,
)
from dpaudit.stats.rootfinding import LARGEST_ERROR, smallest_error
from dpaudit.stats.thresholds._base import EmpiricalROC, ThresholdRule, simulated_roc, unsupported
from dpaudit.stats.tradeoffs._attack import Attack

_GROWTH = 5  # ratio of neighboring ranks of Tails, counted from 1


@dataclass(frozen=True)
class Simultaneous(ThresholdRule):
    """The best of several thresholds, at ranks of the absent scores that are fixed before seeing the data.

    The fpr at an absent score of a given rank is a Beta order statistic, whatever the distribution of the
    scores. Given the absent scores the thresholds are fixed, so the false negatives at each are binomial.
    Each rank spends an equal share of the error. Thirty-two ranks cost as much as a Berk-Jones band over all
    ranks of 1,000 scores would (its local level is about error / 30 there), need no calibration, and lose
    nothing between ranks, because the other side is counted at the exact threshold.
    """

    num_thresholds: int = 32

    def __post_init__(self) -> None:
        _validate.integer("num_thresholds", self.num_thresholds)

    @property
    def label(self) -> str:
        return "bands"

    def error(self, error: float, num_absent: int) -> float:
        return error / self.ranks(num_absent).size

    def largest_bound(self, inference: ExactInference, counts: ErrorCounts, query: BoundQuery) -> float:
        return inference.at_rank(counts, query, 0.0) if isinstance(inference, RankInference) else 0.0

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        if not isinstance(inference, RankInference):
            raise unsupported(self, inference, ClopperPearson, JointExact)
        roc = EmpiricalROC.of(observations)
        absent, present = roc.absent, roc.present
        ranks = self.ranks(absent.size)
        thresholds = absent[absent.size - 1 - ranks]
        misses = np.searchsorted(present, thresholds, side="right")
        shared = replace(query, error_rate=self.error(query.error_rate, absent.size))
        # ties at the threshold may leave fewer scores above it; the test holds for the rank
        results = [
            ThresholdResult(0.0, float(threshold), _counts(rank, absent.size, missed, present.size))
            for threshold, rank, missed in zip(thresholds, ranks, misses, strict=True)
        ]
        promising = np.argsort(-inference.rank(ranks, misses, roc.sizes, shared), kind="stable")
        return _largest_bound([results[index] for index in promising], inference, shared)

    def refuting_limits(
        self, claimed: float, sizes: ErrorCounts, inference: ExactInference, query: BoundQuery
    ) -> tuple[IntArray, ...]:
        assert isinstance(inference, RankInference)
        return (inference.most_refuting(self.ranks(sizes.num_absent), claimed, sizes, query),)

    def detection_rate(self, attack: Attack, limits: tuple[IntArray, ...], sizes: ErrorCounts) -> float:
        return _detection_rate(attack, self.ranks(sizes.num_absent), limits[0], sizes)

    def ranks(self, size: int) -> IntArray:
        """Return how many absent scores are above each threshold: evenly spaced in the logit."""
        if size <= self.num_thresholds:
            return np.arange(size)
        most = np.log(2.0 * size)
        logits = np.linspace(-most, most, self.num_thresholds)
        shares = 1 / (1 + np.exp(-logits))
        ranks = np.floor(shares * size).astype(np.int64)
        return _distinct(np.minimum(ranks, size - 1), size)


def _distinct(ranks: IntArray, size: int) -> IntArray:
    """Separate equal neighbors by moving them up, then back below ``size``."""
    for i in range(1, ranks.size):
        ranks[i] = max(ranks[i], ranks[i - 1] + 1)
    for i in range(ranks.size - 1, -1, -1):
        ranks[i] = min(ranks[i], size - (ranks.size - i))
    return ranks


@dataclass(frozen=True)
class Tails(ThresholdRule):
    """The best of a few far thresholds: high ranks of the absent scores and low ranks of the present ones.

    A threshold in the middle cannot see noise without tails, or a canary that is rarely but fully revealed.
    Beyond the extreme absent score there may then be many present scores. The ranks are 0, 4, 24, ..., up to
    a twentieth of the scores, and share the error equally. Only the extreme scores are kept in memory.
    """

    @property
    def label(self) -> str:
        return "tails"

    def error(self, error: float, num_absent: int) -> float:
        return error / (2 * self.ranks(num_absent).size)

    def largest_bound(self, inference: ExactInference, counts: ErrorCounts, query: BoundQuery) -> float:
        return inference.at_rank(counts, query, 0.0) if isinstance(inference, RankInference) else 0.0

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        if not isinstance(inference, RankInference):
            raise unsupported(self, inference, ClopperPearson, JointExact)
        absent, present = observations.without_canary, observations.with_canary
        sides = (("without_canary", absent), ("with_canary", present))
        high = _extremes(*sides[0], self.ranks(absent.size), sign=1)
        low = _extremes(*sides[1], self.ranks(present.size), sign=-1)
        results = [
            ThresholdResult(0.0, float(threshold), _counts(rank, absent.size, missed, present.size))
            for rank, threshold, missed in zip(
                self.ranks(absent.size), high, _count_up_to(*sides[1], high, sign=1), strict=True
            )
        ]
        results += [
            # a present score at the threshold is not an error, so the threshold is just below it
            ThresholdResult(
                0.0, float(np.nextafter(threshold, -np.inf)), _counts(wrong, absent.size, rank, present.size)
            )
            for rank, threshold, wrong in zip(
                self.ranks(present.size), low, _count_up_to(*sides[0], low, sign=-1), strict=True
            )
        ]
        shared = replace(query, error_rate=query.error_rate / len(results))
        return _largest_bound(results, inference, shared, num_first=high.size)

    def refuting_limits(
        self, claimed: float, sizes: ErrorCounts, inference: ExactInference, query: BoundQuery
    ) -> tuple[IntArray, ...]:
        assert isinstance(inference, RankInference)
        return tuple(
            inference.most_refuting(self.ranks(side.num_absent), claimed, side, query)
            for side in (sizes, sizes.exchanged())
        )

    def detection_rate(self, attack: Attack, limits: tuple[IntArray, ...], sizes: ErrorCounts) -> float:
        """Return how often a threshold of either side refutes, as if the sides were independent."""
        sides = (attack, sizes), (attack.exchanged(), sizes.exchanged())
        high, low = (
            _detection_rate(side_attack, self.ranks(side.num_absent), most, side)
            for (side_attack, side), most in zip(sides, limits, strict=True)
        )
        return high + low - high * low

    def ranks(self, size: int) -> IntArray:
        """Return how many scores of a side are beyond each threshold."""
        count = 1 + max(int(np.log(max(0.05 * size, 1.0)) / np.log(_GROWTH)), 0)
        return np.asarray(_GROWTH ** np.arange(count) - 1)


def _detection_rate(attack: Attack, ranks: IntArray, limits: IntArray, sizes: ErrorCounts) -> float:
    """Return how often errors are within the limit at any of the ranks, by simulation."""
    rng = np.random.default_rng(2)
    _, misses = simulated_roc(attack, ranks, (sizes.num_absent, sizes.num_present), 2000, rng)
    return float((misses <= limits).any(axis=1).mean())


def _counts(false_positives: int, num_absent: int, false_negatives: int, num_present: int) -> ErrorCounts:
    return ErrorCounts(
        false_positives=int(false_positives),
        num_absent=num_absent,
        false_negatives=int(false_negatives),
        num_present=num_present,
    )


def _largest_bound(
    results: Sequence[ThresholdResult],
    inference: RankInference,
    query: BoundQuery,
    num_first: int | None = None,
) -> ThresholdResult:
    """Return the result with the largest bound; those after ``num_first`` are at ranks of present scores."""
    best, ranked = results[0], []
    for index, result in enumerate(results):
        exchanged = num_first is not None and index >= num_first
        ranked.append(result.counts.exchanged() if exchanged else result.counts)
        parameter = inference.at_rank(ranked[-1], query, best.parameter)
        if parameter > best.parameter:
            best = replace(result, parameter=parameter)
    return replace(best, p_value=partial(_p_value, ranked, inference, query))


def _p_value(
    ranked: Sequence[ErrorCounts], inference: RankInference, query: BoundQuery, claimed: float
) -> float:
    """Return the smallest error rate at which any of several ranks, which share it equally, refutes."""
    most, smallest = LARGEST_ERROR / len(ranked), 1.0
    for counts in ranked:

        def refutes(error: float, counts: ErrorCounts = counts) -> bool:
            return inference.at_rank(counts, replace(query, error_rate=error), claimed) > claimed

        smallest = min(smallest, smallest_error(refutes, min(most, smallest)))
    return min(1.0, smallest * len(ranked))


def _extremes(name: str, scores: ScoreArray, ranks: IntArray, *, sign: int) -> ScoreArray:
    """Return the scores with as many others above (``sign`` 1) or below (-1) as ``ranks`` says, in chunks."""
    most, size = int(ranks[-1]) + 1, 0
    candidates: list[ScoreArray] = []
    least: Any = None  # the smallest score that may still be among the extreme ones
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        values = sign * piece
        candidates.append(values if least is None else values[values > least])
        size += candidates[-1].size
        if size >= 2 * most + piece.size:  # rarely, so that the time grows with the number of scores only
            candidates = [np.partition(np.concatenate(candidates), size - most)[size - most :]]
            least, size = candidates[0][0], most
    ordered = np.sort(np.concatenate(candidates))
    return np.asarray(sign * ordered[ordered.size - 1 - ranks])


def _count_up_to(name: str, scores: ScoreArray, thresholds: ScoreArray, *, sign: int) -> IntArray:
    """Return how many scores are at most (``sign`` 1) or at least (-1) each threshold, in chunks."""
    counts = np.zeros(thresholds.size, dtype=np.int64)
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        values = sign * piece
        counts += [int(np.count_nonzero(values <= threshold)) for threshold in sign * thresholds]
    return counts

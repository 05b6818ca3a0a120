"""Thresholds at scores of given ranks, where the distribution of one error rate is known.

The fpr at an absent score of a given rank is a Beta order statistic, whatever the distribution of the scores.
Given the absent scores the threshold is fixed, so the false negatives at it are binomial.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray, ScoreArray
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
from dpaudit.stats.thresholds._rules import ThresholdRule, unsupported
from dpaudit.stats.tradeoffs import Attack

_GROWTH = 5  # ratio of neighboring ranks of Tails, counted from 1


class RankRule(ThresholdRule):
    """A rule that tries scores of fixed ranks, which share the error equally."""

    @abstractmethod
    def ranks(self, size: int) -> IntArray:
        """Return how many of the ``size`` scores of a side are beyond each threshold, in ascending order."""

    @abstractmethod
    def sides(self, sizes: ErrorCounts) -> tuple[ErrorCounts, ...]:
        """Return the sizes as each ranked side sees them: it is the absent one."""

    def error(self, error: float, num_absent: int) -> float:
        num_sides = len(self.sides(ErrorCounts.perfect(num_absent, num_absent)))
        return error / (num_sides * self.ranks(num_absent).size)

    def largest_bound(self, inference: ExactInference, counts: ErrorCounts, query: BoundQuery) -> float:
        return inference.at_rank(counts, query, 0.0) if isinstance(inference, RankInference) else 0.0

    def refuting_limits(
        self, claimed: float, sizes: ErrorCounts, inference: ExactInference, query: BoundQuery
    ) -> tuple[IntArray, ...]:
        assert isinstance(inference, RankInference)
        return tuple(
            inference.most_refuting(self.ranks(side.num_absent), claimed, side, query)
            for side in self.sides(sizes)
        )

    def detection_rate(self, attack: Attack, limits: tuple[IntArray, ...], sizes: ErrorCounts) -> float:
        """Return how often a threshold of any side refutes, as if the sides were independent."""
        missed = 1.0
        for side, most in zip(self.sides(sizes), limits, strict=True):
            rng = np.random.default_rng(2)
            shape = side.num_absent, side.num_present
            _, misses = simulated_roc(attack, self.ranks(side.num_absent), shape, 2000, rng)
            missed *= 1 - float((misses <= most).any(axis=1).mean())
            attack = attack.exchanged()
        return 1 - missed

    def at_high_scores(self, observations: Observations) -> list[ThresholdResult]:
        """Return threshold and counts at each of the highest absent scores, without a bound.

        Ties at a threshold may leave fewer scores above it; the test holds for the rank.
        """
        absent, present = observations.without_canary, observations.with_canary
        ranks = self.ranks(absent.size)
        thresholds = _extremes("without_canary", absent, ranks, sign=1)
        misses = _count_up_to("with_canary", present, thresholds, sign=1)
        return _results(observations, thresholds, ranks, misses)


@dataclass(frozen=True)
class Simultaneous(RankRule):
    """The best of several thresholds, at ranks of the absent scores that are fixed before seeing the data.

    The fpr at an absent score of a given rank is a Beta order statistic, whatever the distribution of the
    scores. Given the absent scores the thresholds are fixed, so the false negatives at each are binomial.
    Each rank spends an equal share of the error. Thirty-two ranks cost as much as a Berk-Jones band over all
    ranks of 1,000 scores would (its local level is about error / 30 there), need no calibration, and lose
    nothing between ranks, because the other side is counted at the exact threshold.
    """

    num_thresholds: int = 32
    label = "bands"

    def __post_init__(self) -> None:
        _validate.integer("num_thresholds", self.num_thresholds)

    def sides(self, sizes: ErrorCounts) -> tuple[ErrorCounts, ...]:
        return (sizes,)

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        if not isinstance(inference, RankInference):
            raise unsupported(self, inference, ClopperPearson, JointExact)
        results = self.at_high_scores(observations)
        shared = replace(query, error_rate=query.error_rate / len(results))
        fp, fn = np.asarray([(r.counts.false_positives, r.counts.false_negatives) for r in results]).T
        promising = np.argsort(-inference.rank(fp, fn, results[0].counts, shared), kind="stable")
        results = [results[index] for index in promising]
        return _largest_bound(results, [result.counts for result in results], inference, shared)

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
    steps = np.arange(ranks.size)
    ranks = np.maximum.accumulate(ranks - steps) + steps
    return np.minimum(ranks, size - ranks.size + steps)


@dataclass(frozen=True)
class Tails(RankRule):
    """The best of a few far thresholds: high ranks of the absent scores and low ranks of the present ones.

    A threshold in the middle cannot see noise without tails, or a canary that is rarely but fully revealed.
    Beyond the extreme absent score there may then be many present scores. The ranks are 0, 4, 24, ..., up to
    a twentieth of the scores, and share the error equally. Only the extreme scores are kept in memory.
    """

    label = "tails"

    def sides(self, sizes: ErrorCounts) -> tuple[ErrorCounts, ...]:
        return sizes, sizes.exchanged()

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        if not isinstance(inference, RankInference):
            raise unsupported(self, inference, ClopperPearson, JointExact)
        high, low = self.at_high_scores(observations), self._at_low_scores(observations)
        ranked = [result.counts for result in high] + [result.counts.exchanged() for result in low]
        shared = replace(query, error_rate=query.error_rate / len(ranked))
        return _largest_bound([*high, *low], ranked, inference, shared)

    def _at_low_scores(self, observations: Observations) -> list[ThresholdResult]:
        """Return threshold and counts at each of the lowest present scores, without a bound.

        A present score at the threshold is not an error, so the threshold is just below it.
        """
        absent, present = observations.without_canary, observations.with_canary
        ranks = self.ranks(present.size)
        scores = _extremes("with_canary", present, ranks, sign=-1)
        errors = _count_up_to("without_canary", absent, scores, sign=-1)
        return _results(observations, np.nextafter(scores, -np.inf), errors, ranks)

    def ranks(self, size: int) -> IntArray:
        """Return how many scores of a side are beyond each threshold."""
        count = 1 + max(int(np.log(max(0.05 * size, 1.0)) / np.log(_GROWTH)), 0)
        return np.asarray(_GROWTH ** np.arange(count) - 1)


def _results(
    observations: Observations, thresholds: ScoreArray, fp: IntArray, fn: IntArray
) -> list[ThresholdResult]:
    sizes = ErrorCounts.perfect(observations.without_canary.size, observations.with_canary.size)
    return [
        ThresholdResult(0.0, threshold, replace(sizes, false_positives=wrong, false_negatives=missed))
        for threshold, wrong, missed in zip(thresholds.tolist(), fp.tolist(), fn.tolist(), strict=True)
    ]


def _largest_bound(
    results: Sequence[ThresholdResult],
    ranked: Sequence[ErrorCounts],
    inference: RankInference,
    query: BoundQuery,
) -> ThresholdResult:
    """Return the result with the largest bound; ``ranked`` are its counts as the ranked side sees them."""
    best = results[0]
    for result, counts in zip(results, ranked, strict=True):
        parameter = inference.at_rank(counts, query, best.parameter)
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


def simulated_roc(
    attack: Attack, above: IntArray, sizes: tuple[int, int], runs: int, rng: np.random.Generator
) -> tuple[FloatArray, IntArray]:
    """Draw the fpr and the false negatives at absent scores of given ranks; arrays are runs x ranks.

    ``above`` is how many of the ``sizes[0]`` absent scores are higher, in ascending order: the fpr at that
    score is an order statistic of uniform numbers, whatever the distribution of scores.
    """
    gaps = np.diff(np.concatenate([[-1], above, [sizes[0]]]))
    spacings = np.cumsum(rng.gamma(gaps, size=(runs, gaps.size)), axis=1)
    fpr = spacings[:, :-1] / spacings[:, -1:]
    fnr = np.minimum.accumulate(np.clip(attack.fnr(fpr), 0.0, 1.0), axis=1)
    before = np.concatenate([np.ones((runs, 1)), fnr[:, :-1]], axis=1)
    detected = np.clip(1 - fnr / np.maximum(before, 1e-300), 0.0, 1.0)
    misses = np.empty(fnr.shape, dtype=np.int64)
    left = np.full(runs, sizes[1])
    for column in range(above.size):
        left = left - rng.binomial(left, detected[:, column])
        misses[:, column] = left
    return fpr, misses

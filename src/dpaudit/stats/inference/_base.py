"""The interface of inference methods: query, result, and the meaning of the error rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpaudit._types import FloatArray, IntArray
from dpaudit.stats._counts import ErrorCounts, count
from dpaudit.stats._observations import Observations
from dpaudit.stats._serialization import Serializable
from dpaudit.stats.rootfinding import smallest_error
from dpaudit.stats.tradeoffs import TradeOff

if TYPE_CHECKING:
    from dpaudit.stats.inference._classical import Region

# assumptions, which docs/verdicts.md explains
_FIXED_BEFORE = "was fixed before seeing the data"
_OF_ONE_RUN = "for the steps of one training run, independence is an assumption about the mechanism"


class Kind(StrEnum):
    """What a bound's error rate means."""

    CONFIDENCE = "confidence"
    CREDIBLE = "credible"
    HEURISTIC = "heuristic"

    @property
    def meaning(self) -> str:
        """A short explanation, for legends and glossaries."""
        return {
            Kind.CONFIDENCE: "exceeds the truth at most as often as stated",
            Kind.CREDIBLE: "depends on a prior",
            Kind.HEURISTIC: "error rate unknown",
        }[self]


@dataclass(frozen=True)
class BoundQuery:
    """A query for the largest parameter of ``tradeoff`` that the data refute at level ``error_rate``."""

    tradeoff: TradeOff
    delta: float
    error_rate: float


@dataclass(frozen=True)
class ThresholdResult:
    """The refuted parameter, with the threshold and counts behind it (the last ones if they varied).

    ``rule`` is the threshold rule of the bound if the one that was applied chose between several. ``p_value``
    returns the smallest error rate at which a parameter is refuted, at thresholds that stay as they are.
    """

    parameter: float
    threshold: float | None
    counts: ErrorCounts
    rule: Serializable | None = None
    p_value: Callable[[float], float] | None = field(default=None, repr=False, compare=False)


class Inference(Serializable, ABC):
    """A method that converts the errors at one threshold to the largest refuted parameter."""

    kind: ClassVar[Kind]

    @abstractmethod
    def at_threshold(
        self, observations: Observations, threshold: float, query: BoundQuery
    ) -> ThresholdResult:
        """Return the result at a threshold that does not depend on these observations."""

    @abstractmethod
    def assumption(self, observations: Observations | ErrorCounts, *, is_fixed: bool) -> str:
        """Return the assumption about the observations; ``is_fixed`` if their threshold was fixed before."""


class CountInference(Inference):
    """An inference that needs only the four counts."""

    # Whether rank() is the bound itself; otherwise it is an approximation.
    rank_is_bound: ClassVar[bool] = False
    # Whether pairs of observations may differ in their rates, at a fixed threshold.
    allows_unequal_rates: ClassVar[bool] = False

    def parameter(self, counts: ErrorCounts, query: BoundQuery) -> float:
        """Return the largest refuted parameter, 0 if none; by default the rank, if that is the bound."""
        fp, fn = np.asarray(counts.false_positives), np.asarray(counts.false_negatives)
        return float(self.rank(fp, fn, counts, query))

    @abstractmethod
    def rank(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        """Return numbers that order pairs of counts like their bounds and decrease with more errors.

        Only the group sizes of ``sizes`` are used. The rank is used to search among thresholds, so it may
        be a cheap approximation of the bound.
        """

    def limit(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        """Return a close, cheap upper bound on the rank of these counts and of all with more errors."""
        return self.rank(false_positives, false_negatives, sizes, query)

    def at_threshold(
        self, observations: Observations, threshold: float, query: BoundQuery
    ) -> ThresholdResult:
        return self.at_counts(count(observations, threshold), threshold, query)

    def at_counts(self, counts: ErrorCounts, threshold: float, query: BoundQuery) -> ThresholdResult:
        """Return the result from the counts at a threshold that does not depend on them."""
        p_value = partial(self.p_value, counts, query)
        return ThresholdResult(self.parameter(counts, query), threshold, counts, p_value=p_value)

    def p_value(self, counts: ErrorCounts, query: BoundQuery, claimed: float) -> float:
        """Return the smallest error rate at which the counts refute ``claimed``."""
        return smallest_error(
            lambda error: self.parameter(counts, replace(query, error_rate=error)) > claimed
        )

    def assumption(self, observations: Observations | ErrorCounts, *, is_fixed: bool) -> str:
        scored = observations if isinstance(observations, Observations) else None
        within = ", including those of canaries in the same step," if scored and scored.is_stepped else ""
        unequal = self.allows_unequal_rates and is_fixed and _has_pairs(observations)
        alike = "" if unequal else " and, on each side, identically distributed"
        text = f"all observations{within} are independent{alike}, and their number {_FIXED_BEFORE}"
        # raw scores in one dimension are mostly those of separate runs
        if scored is not None and not scored.is_stepped and not scored.normalized:
            return text
        return f"{text}; {_OF_ONE_RUN}"


def _has_pairs(observations: Observations | ErrorCounts) -> bool:
    """Return whether each observation with the canary may have one without it as its counterpart."""
    if isinstance(observations, ErrorCounts):
        return observations.num_absent == observations.num_present
    return not observations.by_coin and observations.with_canary.size == observations.without_canary.size


class ExactInference(CountInference):
    """An inference from counts with a confidence guarantee, whose power can be computed."""

    kind: ClassVar[Kind] = Kind.CONFIDENCE

    @abstractmethod
    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], query: BoundQuery
    ) -> Region:
        """Return the outcomes that refute ``claimed``, restricted to those relevant for rates in ``fpr``."""


class RankInference(ExactInference):
    """An exact inference that is also valid at a score of a fixed rank, which depends on the data."""

    @abstractmethod
    def at_rank(self, counts: ErrorCounts, query: BoundQuery, floor: float) -> float:
        """Return the largest refuted parameter at a score of a fixed rank, or ``floor`` if that is larger.

        The threshold is the absent score with ``counts.false_positives`` others above it.
        """

    @abstractmethod
    def most_refuting(
        self, ranks: IntArray, claimed: float, sizes: ErrorCounts, query: BoundQuery
    ) -> IntArray:
        """Return, for each rank, the most false negatives with which ``claimed`` is refuted, -1 if none."""

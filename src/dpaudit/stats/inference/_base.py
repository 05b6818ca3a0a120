"""The interface of an inference: its query, its result, and what its error rate means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np

from dpaudit._types import FloatArray, IntArray
from dpaudit.stats._binomial import Region
from dpaudit.stats._counts import ErrorCounts, count
from dpaudit.stats._observations import Observations
from dpaudit.stats._serialization import Serializable
from dpaudit.stats.tradeoffs import TradeOff


class Kind(StrEnum):
    """What a bound's error rate means."""

    CONFIDENCE = "confidence"
    CREDIBLE = "credible"
    HEURISTIC = "heuristic"

    @property
    def meaning(self) -> str:
        """What it says of the truth, for legends and glossaries."""
        return {
            Kind.CONFIDENCE: "above the truth at most as often as stated",
            Kind.CREDIBLE: "depends on a prior",
            Kind.HEURISTIC: "no error rate is known",
        }[self]


@dataclass(frozen=True)
class BoundQuery:
    """The largest parameter of ``tradeoff`` that the data refute with error probability ``error_rate``."""

    tradeoff: TradeOff
    delta: float
    error_rate: float


@dataclass(frozen=True)
class ThresholdResult:
    """The refuted parameter, and the threshold and counts it came from (the last, where they moved)."""

    parameter: float
    threshold: float | None
    counts: ErrorCounts


class Inference(Serializable, ABC):
    """Turns the errors at one threshold into the largest refuted parameter."""

    kind: ClassVar[Kind]

    @abstractmethod
    def at_threshold(
        self, observations: Observations, threshold: float, query: BoundQuery
    ) -> ThresholdResult:
        """Return the result at a threshold that does not depend on these observations."""

    @abstractmethod
    def assumption(self, stepped: bool) -> str:
        """Return what the observations must satisfy; ``stepped`` if several canaries share a step."""

    def check(self, query: BoundQuery) -> None:
        """Raise an ``InputError`` for a query that this inference cannot answer."""
        del query


class CountInference(Inference):
    """An inference that needs only the four counts."""

    # Whether rank() is the bound itself; otherwise it is a stand-in.
    rank_is_bound: ClassVar[bool] = False

    def parameter(self, counts: ErrorCounts, query: BoundQuery) -> float:
        """Return the largest refuted parameter, 0 if none: the rank, where that is the bound itself."""
        fp, fn = np.asarray(counts.false_positives), np.asarray(counts.false_negatives)
        return float(self.rank(fp, fn, counts, query))

    @abstractmethod
    def rank(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        """Return a number for each pair of counts that orders them as their bounds do, and falls with errors.

        Only the group sizes of ``sizes`` are used. The rank serves to search among thresholds, so it may
        be a cheap stand-in for the bound.
        """

    def limit(
        self, false_positives: IntArray, false_negatives: IntArray, sizes: ErrorCounts, query: BoundQuery
    ) -> FloatArray:
        """Return an upper bound on the rank of these counts and of all with more errors: close and cheap."""
        return self.rank(false_positives, false_negatives, sizes, query)

    def at_threshold(
        self, observations: Observations, threshold: float, query: BoundQuery
    ) -> ThresholdResult:
        counts = count(observations, threshold)
        return ThresholdResult(self.parameter(counts, query), threshold, counts)

    def assumption(self, stepped: bool) -> str:
        if stepped:
            return "all observations are independent, including those of canaries in the same step"
        return "all observations are independent"


class ExactInference(CountInference):
    """A confidence statement on counts, whose power is therefore exact as well."""

    kind: ClassVar[Kind] = Kind.CONFIDENCE

    @abstractmethod
    def refuting_region(
        self, claimed: float, sizes: ErrorCounts, fpr: tuple[float, float], query: BoundQuery
    ) -> Region:
        """Return the outcomes that refute ``claimed``, as far as they matter for rates in ``fpr``."""

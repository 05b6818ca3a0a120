"""What is asked of the data, and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["Finding", "Kind", "Question"]


class Kind(StrEnum):
    """What a bound's error rate means."""

    CONFIDENCE = "confidence"  # exceeds the truth at most as often as it says
    CREDIBLE = "credible"  # a posterior probability; depends on a prior
    HEURISTIC = "heuristic"  # no error rate is known


@dataclass(frozen=True)
class Question:
    """The largest parameter of ``tradeoff`` that the data refute with error probability ``error``."""

    tradeoff: TradeOff
    delta: float
    error: float


@dataclass(frozen=True)
class Finding:
    """The refuted parameter, and the threshold and counts it came from (the last, where they moved)."""

    parameter: float
    threshold: float | None
    counts: ErrorCounts

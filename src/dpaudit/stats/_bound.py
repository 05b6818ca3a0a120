"""A lower bound with everything that is needed to believe it.

What is asked of the data, and what was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dpaudit.stats._counts import ErrorCounts, Guesses
from dpaudit.stats.tradeoffs import TradeOff


class Kind(StrEnum):
    """What a bound's error rate means."""

    CONFIDENCE = "confidence"  # exceeds the truth at most as often as it says
    CREDIBLE = "credible"  # a posterior probability; depends on a prior
    HEURISTIC = "heuristic"  # no error rate is known


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


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on a trade-off's parameter, and the epsilon it means at ``delta``."""

    epsilon: float
    delta: float
    confidence: float
    parameter: float
    tradeoff: TradeOff
    method: str  # the inference, as it was called
    rule: str  # how the threshold was chosen
    threshold: float | None
    counts: ErrorCounts | Guesses
    kind: Kind
    assumptions: tuple[str, ...]

    @property
    def statement(self) -> str:
        """The bound as a sentence, which says what its error rate means."""
        text = f"epsilon >= {self.epsilon:.4g} at delta = {self.delta:g}"
        if self.tradeoff.symbol != "epsilon":
            text = f"{self.tradeoff.symbol} >= {self.parameter:.4g}, {text}"
        level = f"{100 * self.confidence:g} %"
        return {
            Kind.CONFIDENCE: f"{text}, with {level} confidence",
            Kind.CREDIBLE: f"{text}, with {level} posterior probability (not a confidence bound)",
            Kind.HEURISTIC: f"{text}: a heuristic at nominal {level}, not a confidence bound",
        }[self.kind]

    def __str__(self) -> str:
        lines = [self.statement, f"  {self.tradeoff} + {self.method} + {self.rule}"]
        return "\n".join(lines + [f"  assumes: {text}" for text in self.assumptions])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "epsilon": plain(self.epsilon),
            "delta": self.delta,
            "confidence": self.confidence,
            "kind": str(self.kind),
            "statement": self.statement,
            "parameter": plain(self.parameter),
            "symbol": self.tradeoff.symbol,
            "tradeoff": repr(self.tradeoff),
            "inference": self.method,
            "threshold_rule": self.rule,
            "threshold": self.threshold,
            "counts": self.counts.to_dict(),
            "assumptions": list(self.assumptions),
        }


def plain(value: float) -> float | str:
    """JSON has no infinity: the word stands for it."""
    return value if abs(value) != float("inf") else "inf"

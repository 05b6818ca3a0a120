"""Scores in bins: a report holds how many there are, and no single one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit.stats import Observations
from dpaudit.stats._types import FloatArray, IntArray

__all__ = ["Histogram"]

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

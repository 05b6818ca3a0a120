"""The plane of the two error rates: what the claim allows, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.stats._binomial import plausible_rate
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._types import FloatArray
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["Plane"]

_POINTS = 121
_LEAKIEST = 500.0  # its curve cannot be told from the axes


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """A claimed curve, the curve of the bound, and the measured rates with their region.

    ``region`` holds both true rates with the stated confidence, if all observations are independent: each
    by Clopper and Pearson's interval, at half of the error.
    """

    fpr: FloatArray
    claimed: FloatArray
    bound: FloatArray
    counts: ErrorCounts
    confidence: float
    region: tuple[tuple[float, float], tuple[float, float]]

    @classmethod
    def of(
        cls, counts: ErrorCounts, *, tradeoff: TradeOff, claimed: float, bound: float, confidence: float
    ) -> Plane:
        """The curves with the parameters ``claimed`` and ``bound``."""
        error = (1 - confidence) / 2
        region = (
            plausible_rate(counts.false_positives, counts.num_absent, error),
            plausible_rate(counts.false_negatives, counts.num_present, error),
        )
        # dense at both ends, where curves bend, and around what was measured
        ends = np.sin(np.linspace(0, np.pi / 2, _POINTS)) ** 2
        near = np.linspace(max(region[0][0] - 0.1, 0.0), min(region[0][1] + 0.1, 1.0), _POINTS)
        fpr = np.union1d(ends, near)
        return cls(
            fpr=fpr,
            claimed=_curve(tradeoff, claimed, fpr),
            bound=_curve(tradeoff, bound, fpr),
            counts=counts,
            confidence=confidence,
            region=region,
        )


def _curve(tradeoff: TradeOff, parameter: float, fpr: FloatArray) -> FloatArray:
    return np.clip(np.nan_to_num(tradeoff.fnr(min(parameter, _LEAKIEST), fpr)), 0.0, 1.0)

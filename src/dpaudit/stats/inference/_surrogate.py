"""A stand-in for a joint bound that is cheap enough for every threshold."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._types import FloatArray, IntArray
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["surrogate"]


def surrogate(
    false_positives: IntArray,
    false_negatives: IntArray,
    sizes: ErrorCounts,
    tradeoff: TradeOff,
    error: float,
) -> FloatArray:
    """The parameter at Jeffreys' upper ends of both rates, each raised by z / sqrt(2) deviations.

    Two rates that are each off by z / sqrt(2) deviations are off by z together.
    """
    level = float(special.ndtr(-special.ndtri(error) / math.sqrt(2)))
    ends = [
        np.asarray(special.betaincinv(errors + 0.5, trials - errors + 0.5, level), np.float64)
        for errors, trials in (
            (false_positives, sizes.num_absent),
            (false_negatives, sizes.num_present),
        )
    ]
    return tradeoff.parameter(ends[0], ends[1])

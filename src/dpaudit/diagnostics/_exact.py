"""The few distributions that p-values of amounts come from; all exact for normal noise, at any size.

Real noise is rounded: to float32, or to a grid. So each p-value here is the largest one over all noise
that differs from normal noise by at most a ``resolution`` in every coordinate: ``RESOLUTION``, a thousandth
of the claimed standard deviation, unless more is said to be rounded. It costs power only against faults
that small.
"""

from __future__ import annotations

import numpy as np
from scipy import special, stats

from dpaudit.stats._types import ArrayLike, FloatArray

__all__ = ["RESOLUTION", "any_of", "below_claim", "below_rest", "chance", "uniform"]

RESOLUTION = 1e-3
_SEED = 0x5EED_0F_D1A6  # our own coins: nothing that a training would be seeded with


def chance(purpose: int) -> np.random.Generator:
    """A generator for coins of our own, the same every time: a diagnosis can be repeated."""
    return np.random.default_rng([_SEED, purpose])


def any_of(p_value: float, count: float) -> float:
    """The p-value of the smallest of ``count`` (Bonferroni): however they depend on each other."""
    return min(1.0, float(p_value) * count)


def below_claim(energy: ArrayLike, count: ArrayLike, resolution: float = RESOLUTION) -> FloatArray:
    """How likely ``count`` squared normal numbers are to add up to ``energy`` or less."""
    number = np.asarray(count, dtype=np.float64)
    highest = (np.sqrt(energy) + resolution * np.sqrt(number)) ** 2
    return np.asarray(stats.chi2.cdf(highest, number), dtype=np.float64)


def below_rest(
    energy: FloatArray,
    count: FloatArray,
    total: float,
    total_count: float,
    resolution: float = RESOLUTION,
) -> FloatArray:
    """How likely ``count`` of ``total_count`` squares are to be so small a share, whatever the scale is."""
    rest = np.maximum(total_count - count, 0.0)
    highest = (np.sqrt(energy) + resolution * np.sqrt(count)) ** 2
    others = np.sqrt(np.maximum(total - energy, 0.0)) - resolution * np.sqrt(rest)
    lowest = np.maximum(others, 0.0) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(lowest > 0, highest / (highest + lowest), 1.0)
        p_values = special.betainc(count / 2, rest / 2, share)
    return np.where((rest > 0) & (lowest > 0), p_values, 1.0)


def uniform(values: FloatArray, tolerance: float = 0.0) -> float:
    """How likely uniform numbers are to be spread so unevenly (Kolmogorov and Smirnov, exact).

    Their distribution may be off by ``tolerance`` anywhere.
    """
    count = values.size
    if count == 0:
        return 1.0
    ranks = np.arange(count + 1) / count
    ordered = np.sort(values)
    farthest = float(max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max()))
    return float(stats.kstwo.sf(max(farthest - tolerance, 0.0), count))

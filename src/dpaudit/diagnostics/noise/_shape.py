"""Whether the noise is normal."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import uniform
from dpaudit.diagnostics.noise._record import NoiseRecord
from dpaudit.stats._types import FloatArray

__all__ = ["cross_ratio_chance", "noise_shape"]

_MOST = 2**17
# What rounding can do to the distribution of cross ratios, in units of the resolution: 4.1 where each of
# the four numbers is moved to the worse side (simulated).
_TOLERANCE = 5.0


def noise_shape(record: NoiseRecord) -> Check | None:
    """Cross ratios of two coordinates in two steps: neither has to have the scale of the other.

    What each coordinate has more of, and what each step has more of, is divided out. So neither the claimed
    nor an estimated variance enters.
    """
    ratios = _cross_ratios(record.sketches.rows.astype(np.float64))
    if ratios is None:
        return None
    places = cross_ratio_chance(ratios)
    mean = float(places.mean()) if places.size else 0.5
    tails = "longer" if mean > 0.5 else "shorter"
    return Check(
        name="noise-shape",
        p_value=uniform(places, _TOLERANCE * record.resolution),
        sentence=f"The noise is not normal: its tails are {tails} than those of normal noise.",
        estimate=mean,
    )


def cross_ratio_chance(ratios: FloatArray) -> FloatArray:
    """How likely a cross ratio of normal numbers is to be nearer to 1, on a scale of absolute logarithms.

    It is a product of two Cauchy numbers, whose logarithm has the density r / sinh(r), up to a factor.
    """
    inverse = np.exp(-ratios)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = ratios * np.log(np.tanh(ratios / 2))
        rest = special.spence(1 - inverse) - special.spence(1 + inverse)
        chances = 1 + 4 / math.pi**2 * (first - rest)
    return np.clip(np.where(ratios == 0, 0.0, np.where(np.isinf(ratios), 1.0, chances)), 0.0, 1.0)


def _cross_ratios(rows: FloatArray) -> FloatArray | None:
    """Absolute logarithms, of blocks that share no number.

    A coordinate or a step of zeros has none; and steps that are equal, for which there is another test, have
    no shape of their own.
    """
    if min(rows.shape) < 2:
        return None
    even = rows[: len(rows) // 2 * 2, : rows.shape[1] // 2 * 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.abs(even))
        across = logs[:, ::2] - logs[:, 1::2]
        ratios: FloatArray = np.abs(across[::2] - across[1::2]).ravel()[:_MOST]
    return ratios[ratios > 0]

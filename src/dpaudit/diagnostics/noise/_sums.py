"""Whether the coordinates of a leaf go up and down together."""

from __future__ import annotations

import math

from scipy import stats

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import RESOLUTION
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["coordinate_correlation"]


def coordinate_correlation(record: NoiseRecord) -> Check | None:
    """The sums of the leaves in each step: too large if coordinates share their noise, or a mean.

    Of independent noise, they have a share of all squares that is Beta distributed, whatever the scale is.
    """
    sums = record.num_steps * record.layout.sizes.size
    rest = record.count - sums
    if rest < 1:
        return None
    highest = (math.sqrt(record.energy) + RESOLUTION * math.sqrt(record.count)) ** 2
    mean = record.sum_energy / sums
    return Check(
        name="coordinate-correlation",
        p_value=float(stats.beta.sf(min(record.sum_energy / highest, 1.0), sums / 2, rest / 2)),
        sentence="Coordinates share their noise, or it has a mean other than zero: squared sums over a leaf "
        f"are {mean * record.count / record.energy if record.energy > 0 else 0.0:.3g} times what "
        "independent coordinates give.",
        estimate=mean * record.count / record.energy if record.energy > 0 else 0.0,
    )

"""Whether the coordinates of a leaf go up and down together."""

from __future__ import annotations

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._signs import swaying
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["coordinate_correlation"]


def coordinate_correlation(record: NoiseRecord) -> Check | None:
    """Sums of signs over each leaf in each step: too large if coordinates share their noise, or a mean."""
    sums = record.num_steps * record.layout.sizes.size
    if record.count == sums:  # a coordinate a leaf
        return None
    share = record.sum_energy / sums
    return Check(
        name="coordinate-correlation",
        p_value=swaying(record.sum_energy, sums),
        sentence="Coordinates share their noise, or it has a mean other than zero: squared sums of signs "
        f"over a leaf are {share:.3g} times what independent coordinates give.",
        estimate=share,
    )

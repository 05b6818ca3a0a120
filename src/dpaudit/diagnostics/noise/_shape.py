"""Whether the noise is normal."""

from __future__ import annotations

import math

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import uniform
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["noise_shape"]

_MOST = 2**18
_TOLERANCE = 2e-3  # what a rounding by RESOLUTION can do to the distribution of the angles


def noise_shape(record: NoiseRecord) -> Check | None:
    """Angles of pairs of coordinates: uniform for normal noise of any scale, and for no other noise.

    Two independent numbers have a direction that does not depend on their length only if they are normal
    (Herschel, Maxwell). So neither the claimed nor an estimated variance enters.
    """
    values = np.abs(record.sketches.rows.astype(np.float64).ravel()[: 2 * _MOST])
    pairs = values[: values.size // 2 * 2].reshape(-1, 2)
    pairs = pairs[pairs.any(axis=1)]
    if len(values) < 2:
        return None
    angles = np.arctan2(pairs.min(axis=1), pairs.max(axis=1)) / (math.pi / 4)
    mean = float(angles.mean()) if angles.size else 0.5
    tails = "longer" if mean < 0.5 else "shorter"
    return Check(
        name="noise-shape",
        p_value=uniform(angles, _TOLERANCE),
        sentence=f"The noise is not normal: its tails are {tails} than those of normal noise.",
        estimate=mean,
    )

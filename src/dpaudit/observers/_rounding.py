"""How far a sum of gradients is off that was made in their own precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit.observers._arrays import as_numpy

__all__ = ["sum_rounding"]

_SAFETY = 4.0  # other orders of summing, and what clipping rounds


def sum_rounding(gradients: Any, norm: float) -> float:
    """How far a coordinate of a single-precision sum of clipped gradients may be off; 0 in double precision.

    A bound that always holds would be thousands of times too large for gradients that point in all
    directions. So the rows are added up one after another in single precision, and compared; the sum of many
    equal rows is rounded the same way at every row, and can be off by more than the noise.
    """
    if str(gradients.dtype).endswith("float64") or len(gradients) == 0:
        return 0.0
    rows = as_numpy(gradients)
    rows = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / norm)
    exact = rows.sum(axis=0)
    # along the first axis, numpy adds row by row
    error = np.abs(rows.astype(np.float32).sum(axis=0) - exact).max()
    return float(_SAFETY * error + np.finfo(np.float32).eps * np.abs(exact).max())

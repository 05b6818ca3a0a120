"""Many tests, one error rate: Holm 1979, "A simple sequentially rejective multiple test procedure"."""

from __future__ import annotations

import numpy as np

from dpaudit.stats._types import ArrayLike, FloatArray

__all__ = ["holm"]


def holm(p_values: ArrayLike) -> FloatArray:
    """The smallest level at which each would be rejected; valid however the tests depend on each other.

    >>> holm([0.01, 0.04, 0.03])
    array([0.03, 0.06, 0.06])
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    stepped = values[order] * np.arange(values.size, 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1.0)
    return adjusted

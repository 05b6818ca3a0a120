"""Names for the array types of this package."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ArrayLike", "BoolArray", "FloatArray", "IntArray", "ScoreArray", "at_least_zero"]

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ScoreArray: TypeAlias = npt.NDArray[np.floating]
ArrayLike: TypeAlias = npt.ArrayLike


def at_least_zero(values: ArrayLike) -> FloatArray:
    """The values, but 0 where they are negative or undefined (0/0 and inf - inf say nothing)."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(array > 0, array, 0.0)

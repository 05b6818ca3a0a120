"""Type aliases for arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ScoreArray: TypeAlias = npt.NDArray[np.floating]
IdArray: TypeAlias = npt.NDArray[Any]  # integers or strings
ArrayLike: TypeAlias = npt.ArrayLike

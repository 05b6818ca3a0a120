"""Formats of floating-point numbers, recognized by the numbers themselves.

The data type of an array does not show in which precision its numbers were computed or stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpaudit._types import FloatArray

BFLOAT16, FLOAT16, SINGLE, DOUBLE = 2.0**-7, 2.0**-10, 2.0**-23, 2.0**-52  # relative precision


class FormatCheck:
    """The least precise format, at each coordinate, that can hold all releases so far."""

    def __init__(self) -> None:
        self._is_bfloat16 = self._is_float16 = self._is_single = np.ones(0, dtype=np.bool_)
        self._has_value = np.zeros(0, dtype=np.bool_)  # zeros are in every format

    def observe(self, released: Any) -> None:
        """Add a release exactly as the step returned it, before it is multiplied by anything."""
        values = np.asarray(released, dtype=np.float64)
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
            is_single = single == values
            is_float16 = is_single & (single.astype(np.float16) == single)
        is_bfloat16 = is_single & ((single.view(np.uint32) & 0xFFFF) == 0)
        if self.is_empty:
            self._is_single, self._is_float16, self._is_bfloat16 = is_single, is_float16, is_bfloat16
            self._has_value = values != 0
        else:
            self._has_value |= values != 0
            self._is_single &= is_single
            self._is_float16 &= is_float16
            self._is_bfloat16 &= is_bfloat16

    @property
    def is_empty(self) -> bool:
        """Whether no release was observed."""
        return self._is_single.size == 0

    def precision(self, leaves: Sequence[int]) -> FloatArray:
        """Return the relative precision at each coordinate: that of the numbers of its whole leaf.

        A single coordinate may have no contribution other than the noise, whose own lattice would then be
        taken for that of the release.
        """
        sizes = np.asarray([size for size in leaves if size > 0])
        starts = np.cumsum(sizes) - sizes
        found = np.full(sizes.size, DOUBLE)
        for flags, eps in (
            (self._is_single, SINGLE),
            (self._is_float16, FLOAT16),
            (self._is_bfloat16, BFLOAT16),
        ):
            found[np.logical_and.reduceat(flags, starts)] = eps
        found[~np.logical_or.reduceat(self._has_value, starts)] = SINGLE
        return np.repeat(found, sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        return {name: value.copy() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        vars(self).update({name: np.array(value, dtype=np.bool_) for name, value in state.items()})

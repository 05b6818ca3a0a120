"""All pairs of many rows, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dpaudit.stats._types import BoolArray, IntArray

__all__ = ["products"]

_BLOCK = 512


def products(rows: npt.NDArray[np.float32]) -> Iterator[tuple[IntArray, npt.NDArray[np.float32], BoolArray]]:
    """Numbers of some rows, their dot products with all rows up to the last of them, and which come before.

    Where the third is true, the column is of an earlier row: so each pair comes once.
    """
    for start in range(0, len(rows), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(rows)))
        found = rows[block] @ rows[: block[-1] + 1].T
        yield block, found, np.arange(found.shape[1]) < block[:, None]

"""Reading scores piece by piece.

A memory-mapped file that is read through one long mapping stays in the process's resident memory. Here
each piece gets a mapping of its own that is dropped after use, so that 250 million scores cost no more
memory than one piece.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._types import ScoreArray

__all__ = ["chunks", "is_on_disk", "require_finite"]

# One megabyte of float32: a piece stays in the second-level cache while it is compared and summed.
_CHUNK = 1 << 18


def is_on_disk(scores: ScoreArray) -> bool:
    """Whether ``scores`` is a whole memory-mapped file (a slice of one does not know its place)."""
    return isinstance(scores, np.memmap) and isinstance(scores.base, mmap.mmap)


def chunks(scores: ScoreArray) -> Iterator[tuple[int, ScoreArray]]:
    """The scores in flat order, as (index of the first, piece)."""
    if isinstance(scores, np.memmap) and is_on_disk(scores) and scores.flags.c_contiguous:
        for start in range(0, scores.size, _CHUNK):
            yield start, _window(scores, start, min(_CHUNK, scores.size - start))
        return
    flat = scores.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield start, flat[start : start + _CHUNK]


def _window(scores: np.memmap, start: int, size: int) -> ScoreArray:
    offset = scores.offset + start * scores.dtype.itemsize
    assert scores.filename is not None  # whole files have one
    piece = np.memmap(scores.filename, scores.dtype, "r", offset, (size,))
    return np.asarray(piece)


def require_finite(name: str, start: int, piece: ScoreArray) -> None:
    """Refuse NaN and infinity, naming the first bad index."""
    # A finite sum proves that all are finite and is several times cheaper than looking at each.
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(float(piece.sum())):
            return
    bad = np.flatnonzero(~np.isfinite(piece))
    if bad.size:
        index = start + int(bad[0])
        raise InputError(f"Expected finite scores, got {name}[{index}]={float(piece[bad[0]])!r}.")

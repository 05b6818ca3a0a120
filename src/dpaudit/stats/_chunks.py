"""Reading scores piece by piece.

A memory-mapped file that is read through its mapping stays in the process's resident memory, and every
page of it costs a fault. Here its pieces are read into one buffer instead, so that 250 million scores
cost no more memory than one piece.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from dpaudit._foreign import open_file
from dpaudit.errors import InputError
from dpaudit.stats._types import ScoreArray

__all__ = ["chunks", "is_on_disk", "require_finite"]

# One megabyte of float32: a piece stays in the second-level cache while it is checked and compared.
_CHUNK = 1 << 18


def is_on_disk(scores: ScoreArray) -> bool:
    """Whether ``scores`` is a whole memory-mapped file (a slice of one does not know its place)."""
    return isinstance(scores, np.memmap) and isinstance(scores.base, mmap.mmap)


def chunks(scores: ScoreArray) -> Iterator[tuple[int, ScoreArray]]:
    """The scores in flat order, as (index of the first, piece). A piece lasts until the next is asked for."""
    if isinstance(scores, np.memmap) and is_on_disk(scores) and scores.flags.c_contiguous:
        yield from _from_file(scores)
        return
    flat = scores.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield start, flat[start : start + _CHUNK]


def _from_file(scores: np.memmap) -> Iterator[tuple[int, ScoreArray]]:
    assert scores.filename is not None  # whole files have one
    buffer = np.empty(min(_CHUNK, scores.size), scores.dtype)
    with open_file(scores.filename) as file:
        file.seek(scores.offset)
        for start in range(0, scores.size, _CHUNK):
            piece = buffer[: scores.size - start]
            if file.readinto(piece.data) != piece.nbytes:
                raise InputError(f"Expected {scores.size:,} scores in {scores.filename}, but it ends before.")
            yield start, piece


def require_finite(name: str, start: int, piece: ScoreArray) -> None:
    """Refuse NaN and infinity, naming the first bad index."""
    if np.isfinite(piece).all():
        return
    bad = int(np.flatnonzero(~np.isfinite(piece))[0])
    raise InputError(f"Expected finite scores, got {name}[{start + bad}]={float(piece[bad])!r}.")

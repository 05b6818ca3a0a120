"""Which steps have the same noise, once it is known that some do."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._pairs import products
from dpaudit.stats._types import BoolArray, FloatArray, IntArray

__all__ = ["described"]

_SAME = 0.95  # the correlation from which on noise is called the same, if its length is too


def described(rows: FloatArray, steps: IntArray) -> str | None:
    """A sentence on the rows that come again, as they are or as a multiple; None if no two are so alike."""
    lengths = np.linalg.norm(rows, axis=1)
    same, multiple = _earlier(rows, lengths)
    later = np.flatnonzero(multiple >= 0)
    if later.size == 0:
        return None
    if 2 * np.count_nonzero(same >= 0) >= later.size:  # of many multiples some have the same length by chance
        return _of_same(steps, same)
    second = int(later[0])
    first = int(multiple[second])
    factor = rows[first] @ rows[second] / lengths[first] ** 2
    return (
        f"The noise of step {steps[second]} is {factor:.2g} times that of step {steps[first]}: "
        f"{later.size} of {len(steps)} steps have a multiple of the noise of an earlier one."
    )


def _earlier(rows: FloatArray, lengths: FloatArray) -> tuple[IntArray, IntArray]:
    """For each row the last one before it that is the same, and that is a multiple of it; -1 if none is."""
    units = np.divide(rows, lengths[:, None], out=np.zeros_like(rows), where=lengths[:, None] > 0)
    same, multiple = np.full(len(rows), -1), np.full(len(rows), -1)
    for block, cosines, is_earlier in products(units.astype(np.float32)):
        shorter = np.minimum(lengths[block][:, None], lengths[: cosines.shape[1]])
        longer = np.maximum(lengths[block][:, None], lengths[: cosines.shape[1]])
        same[block] = _last(is_earlier & (cosines > _SAME) & (shorter > _SAME * longer))
        multiple[block] = _last(is_earlier & (np.abs(cosines) > _SAME))
    return same, multiple


def _last(mask: BoolArray) -> IntArray:
    """The last true place of each row, or -1."""
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.where(mask.any(axis=1), last, -1)


def _of_same(steps: IntArray, same: IntArray) -> str:
    later = np.flatnonzero(same >= 0)
    gaps = steps[later] - steps[same[later]]
    period = int(gaps.min())
    if (gaps == period).all() and later.size == np.count_nonzero(steps >= period) > 1:
        return f"The noise repeats every {period} steps." if period > 1 else "Every step has the same noise."
    return (
        f"The noise of step {steps[same[later[0]]]} comes again in step {steps[later[0]]}: "
        f"{len(steps)} steps have {len(steps) - later.size} different vectors of noise."
    )

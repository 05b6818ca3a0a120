"""Whether the noise of a step is that of another step again."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of, near_line
from dpaudit.diagnostics._pairs import products
from dpaudit.diagnostics.noise._record import NoiseRecord
from dpaudit.stats._types import BoolArray, FloatArray, IntArray

__all__ = ["repeated_noise"]

_SAME = 0.95  # the correlation from which on noise is called the same


def repeated_noise(record: NoiseRecord) -> Check | None:
    """The two steps whose noise is most alike, of all pairs of steps."""
    rows = record.sketches.rows.astype(np.float64)
    num_rows, count = rows.shape
    if num_rows < 2 or count < 2:
        return None
    steps = record.sketches.steps
    first, second, same = _alike(rows)
    squares = (rows[[first, second]] ** 2).sum(axis=1)
    dot = float(rows[first] @ rows[second])
    product = float(np.sqrt(squares.prod()))
    correlation = dot / product if product > 0 else 0.0
    p_value = float(near_line(dot, squares[0], squares[1], count))
    return Check(
        name="repeated-noise",
        p_value=any_of(p_value, num_rows * (num_rows - 1) / 2),
        sentence=_sentence(steps, int(steps[first]), int(steps[second]), correlation, same),
        estimate=correlation,
    )


def _alike(rows: FloatArray) -> tuple[int, int, IntArray]:
    """The pair of rows that are most alike; and for each row the last same row before it, or -1."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0).astype(np.float32)
    best, pair = -1.0, (0, 1)
    same = np.full(len(rows), -1)
    for block, dots, is_earlier in products(units):
        cosines = np.where(is_earlier, np.abs(dots), -1.0)
        later, earlier = np.unravel_index(int(cosines.argmax()), cosines.shape)
        if cosines[later, earlier] > best:
            best, pair = float(cosines[later, earlier]), (int(earlier), int(block[later]))
        same[block] = _last(cosines > _SAME)
    return *pair, same


def _last(mask: BoolArray) -> IntArray:
    """The last true place of each row, or -1."""
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.where(mask.any(axis=1), last, -1)


def _sentence(steps: IntArray, first: int, second: int, correlation: float, same: IntArray) -> str:
    later = np.flatnonzero(same >= 0)
    if later.size == 0:
        return f"The noise of steps {first} and {second} has a correlation of {correlation:.2g}."
    gaps = steps[later] - steps[same[later]]
    period = int(gaps.min())
    if (gaps == period).all() and later.size == np.count_nonzero(steps >= period) > 1:
        return f"The noise repeats every {period} steps." if period > 1 else "Every step has the same noise."
    different = len(steps) - later.size
    return (
        f"The noise of step {first} comes again in step {second}: "
        f"{len(steps)} steps have {different} different vectors of noise."
    )

"""Whether the noise of a step is that of another step again."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of
from dpaudit.diagnostics._pairs import products
from dpaudit.diagnostics._signs import correlation, same_signs, sure_signs
from dpaudit.diagnostics.noise._alike import described
from dpaudit.diagnostics.noise._record import NoiseRecord
from dpaudit.stats._types import FloatArray

__all__ = ["repeated_noise"]

_SMALL = 0.05  # p-values above it are no finding at any level that is used: nothing to look at more closely


def repeated_noise(record: NoiseRecord) -> Check | None:
    """The two steps whose signs agree, or differ, most often, of all pairs of steps."""
    rows = record.sketches.rows.astype(np.float64)
    num_rows, count = rows.shape
    if num_rows < 2 or count < 2:
        return None
    steps = record.sketches.steps
    first, second, counts = _most_alike(sure_signs(rows, record.resolution))
    p_value = any_of(float(same_signs(*counts, count)), num_rows * (num_rows - 1) / 2)
    estimate = float(correlation(*counts))
    sentence = f"The noise of steps {steps[first]} and {steps[second]} has a correlation of {estimate:.2g}."
    return Check(
        name="repeated-noise",
        p_value=p_value,
        sentence=(described(rows, steps) if p_value <= _SMALL else None) or sentence,
        estimate=estimate,
    )


def _most_alike(signs: FloatArray) -> tuple[int, int, tuple[int, int]]:
    """The pair of rows with the smallest p-value; how many of its signs agree, how many differ.

    The search counts a place twice that is not sure in both rows. So it may miss the best pair by very
    little, which errs on the safe side: the p-value is that of the pair that it found.
    """
    single = signs.astype(np.float32)
    sure = np.abs(single).sum(axis=1)
    best, pair = -np.inf, (0, 1)
    for block, dots, is_earlier in products(single):
        extremes = np.abs(dots) + sure[block][:, None] + sure[: dots.shape[1]]
        extremes[~is_earlier] = -np.inf
        later, earlier = np.unravel_index(int(extremes.argmax()), extremes.shape)
        if extremes[later, earlier] > best:
            best, pair = float(extremes[later, earlier]), (int(earlier), int(block[later]))
    first, second = signs[pair[0]], signs[pair[1]]
    agreeing, differing = (int(np.count_nonzero(first * second == sign)) for sign in (1, -1))
    return *pair, (agreeing, differing)

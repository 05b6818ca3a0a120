"""The threshold with the fewest errors, found without following the noise."""

from __future__ import annotations

import numpy as np

from dpaudit.stats._types import FloatArray, ScoreArray

__all__ = ["least_balanced_error", "smooth"]


def least_balanced_error(absent: ScoreArray, present: ScoreArray) -> float:
    """The best of some quantiles of all scores; few and smoothed, so that noise does not decide."""
    if not absent.size or not present.size:
        return 0.0
    scores = np.concatenate([absent, present])
    count = int(np.clip(np.sqrt(scores.size), 1, 65)) // 2 * 2 + 1  # odd: the median is one
    candidates = np.quantile(scores, np.linspace(0, 1, count + 2)[1:-1])
    fp = 1 - np.searchsorted(np.sort(absent), candidates, side="right") / absent.size
    fn = np.searchsorted(np.sort(present), candidates, side="right") / present.size
    errors = smooth(fp + fn)
    return float(candidates[int(errors.argmin())])


def smooth(values: FloatArray) -> FloatArray:
    """A moving average over a sixth of the places: the extreme of a noisy curve moves less."""
    half = values.size // 12
    if half == 0:
        return values
    padded = np.pad(values, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")

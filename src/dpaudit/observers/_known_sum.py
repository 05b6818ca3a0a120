"""Whether what was taken off a release is the sum of the other examples that is in it."""

from __future__ import annotations

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["UnknownSumError", "require_known_sum"]

_FEW = 20  # scores of a canary, from which on their mean says something
_ROUNDING = 1e-2  # in clipping norms: a step without noise is not held to the last digit


class UnknownSumError(InputError):
    """A step adds up something else than clipped gradients."""


def require_known_sum(scores: FloatArray, present: BoolArray) -> None:
    """Scores of canaries that stay where they are, steps x canaries: absent ones are 0 on average.

    If they are not, surely, the step adds up something else than clipped gradients. Then every score is off
    by it, and what is wrong with the clipping would hide a canary.
    """
    absent = np.where(present, np.nan, scores)
    counts = (~present).sum(axis=0)
    absent, counts = absent[:, counts >= _FEW], counts[counts >= _FEW]
    if counts.size == 0:
        return
    means, spreads = np.nanmean(absent, axis=0), np.maximum(np.nanstd(absent, axis=0), _ROUNDING)
    squares = counts * (means / spreads) ** 2
    if squares.mean() > 2 + 10 * np.sqrt(2 / counts.size):  # 1, and ten standard errors
        off = float(np.abs(means).max())
        raise UnknownSumError(
            "Expected the step to release the sum of the clipped gradients and noise, got another sum, off "
            f"by {off:.3g} clipping norms where no canary is. Audit it with gradients of zeros: they are the "
            "same with any clipping."
        )

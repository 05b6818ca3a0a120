"""The scores of one step: whether they can be recorded, and how many guesses by them are wrong."""

from __future__ import annotations

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["require_alike", "share_wrong"]

_MIDPOINT = 0.5  # between an absent canary's mean score, 0, and a present one's, 1


def require_alike(scores: FloatArray, present: BoolArray, *, step: int, first: FloatArray) -> None:
    """Refuse scores that are not as many as those of the ``first`` step, or not finite."""
    expected = first.shape if first.ndim == 1 else (first.size,)
    if scores.size == 0 or scores.shape != present.shape or scores.shape != expected:
        raise InputError(
            f"Expected one score and one presence for each of {expected[0] or 'some'} canaries in step "
            f"{step}, got shapes {scores.shape} and {present.shape}."
        )
    if not np.isfinite(scores).all():
        index = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise InputError(
            f"Expected finite scores in step {step}, got scores[{index}]={scores[index]}: "
            "did the training diverge?"
        )


def share_wrong(scores: FloatArray, present: BoolArray) -> float:
    """How often a guess by the midpoint is wrong; counted, which is faster than a mean in every step."""
    return int(np.count_nonzero((scores > _MIDPOINT) != present)) / scores.size

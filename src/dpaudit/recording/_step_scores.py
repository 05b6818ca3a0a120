"""The scores of one step: whether they can be recorded, and how many guesses by them are wrong."""

from __future__ import annotations

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats import Inference
from dpaudit.stats._types import BoolArray, FloatArray
from dpaudit.stats.inference._base import CountInference

__all__ = ["require_alike", "require_bets", "share_wrong"]

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


def require_bets(inference: Inference | None) -> None:
    """Counts of scores that share noise vary more than a binomial: no bound by them holds."""
    if isinstance(inference, CountInference):
        raise InputError(
            "Expected inference=Betting() for scores of one step that share its noise, as those of input "
            f"canaries do, got {inference!r}, which counts them as independent."
        )

"""Whether presence can have been decided by fair coins."""

from __future__ import annotations

import numpy as np
from scipy.special import bdtr

from dpaudit.errors import InputError
from dpaudit.stats._types import BoolArray, FloatArray, IntArray

__all__ = ["FAIR", "require_fair"]

FAIR = "every canary was present by a fair coin of its own"  # what a bound assumes

_ERROR = 1e-9  # how often fair coins are refused


def require_fair(present: BoolArray) -> None:
    """Refuse a mask, steps x canaries, of which a step, a canary or all have too many of one side.

    Where half of every step is present, no coin is needed: wrong guesses of both sides count alike.

    >>> require_fair(np.array([[True, False], [False, True]]))
    """
    num_steps, num_canaries = present.shape
    by_step, by_canary = present.sum(axis=1), present.sum(axis=0)
    if (2 * by_step == num_canaries).all():
        return
    counts = {
        "in all": (np.array([present.sum()]), present.size),
        "for one canary": (by_canary, num_steps),
        "in one step": (by_step, num_canaries),
    }
    for where, (found, number) in counts.items():
        least = _probabilities(found, number)
        if least.min() < _ERROR / (len(counts) * least.size):
            there = int(found[least.argmin()])
            raise InputError(
                "Expected each canary of each step to be present by a fair coin of its own, got "
                f"{there:,} of {number:,} present {where}. For other designs give the scores with and "
                "without the canary apart."
            )


def _probabilities(counts: IntArray, number: int) -> FloatArray:
    """Of a count of heads that is as far from half, among so many fair coins."""
    fewer = np.minimum(counts, number - counts)
    likely: FloatArray = np.minimum(1.0, 2 * bdtr(fewer, number, 0.5))
    return likely

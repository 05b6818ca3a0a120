"""Which examples of a data set are held out of its training, for canaries to be made from."""

from __future__ import annotations

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._types import IntArray

__all__ = ["split_places"]


def split_places(num_examples: int, num_held_out: int, seed: int) -> tuple[IntArray, IntArray]:
    """The places of those that are trained on and of those that are held out, drawn at random, in order.

    >>> split_places(5, 2, seed=0)
    (array([0, 1, 3]), array([2, 4]))
    """
    if not 0 < _validate.whole("num_held_out", num_held_out) < num_examples:
        raise InputError(f"Expected num_held_out={num_held_out} in [1, {num_examples - 1}].")
    order = np.random.default_rng(_validate.whole("seed", seed, low=0)).permutation(num_examples)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])

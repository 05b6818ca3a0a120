"""The maximum of many (eps, delta) lines, found among a few of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.stats._types import FloatArray
from dpaudit.stats.tradeoffs._approximate import approximate_fnr
from dpaudit.stats.tradeoffs._hull import lower_hull

__all__ = ["Lines"]

_NEIGHBOURS = np.array([[-1], [0], [1]])  # of the line that should be the highest: rounding may err by one


@dataclass(frozen=True, eq=False)
class Lines:
    """What ``PiecewiseLinear`` is at parameter 1, for those who ask in many places.

    Both lines of a guarantee, 1 - delta - e^eps fpr and its mirror image, are the highest between the
    places where their neighbours cross them. So the highest line is looked up, and the others are not
    computed.
    """

    _epsilons: FloatArray
    _deltas: FloatArray
    _steep_ends: FloatArray  # rates, ascending, at which the next steep line of fewer epsilon is the highest
    _flat_ends: FloatArray  # and the next flat line of more epsilon

    @classmethod
    def of(cls, epsilons: FloatArray, deltas: FloatArray) -> Lines:
        """From guarantees in any order."""
        eps, dels = lower_hull(epsilons, deltas).T
        with np.errstate(over="ignore"):  # epsilons that hardly differ cross nowhere
            risen = -np.diff(dels) / np.expm1(np.diff(eps))  # e^eps fpr where two neighbours cross
        return cls(eps, dels, (np.exp(-eps[:-1]) * risen)[::-1], 1 - dels[:-1] - risen)

    def fnr(self, fpr: FloatArray) -> FloatArray:
        """The highest line at each rate, 0 where all are below."""
        last = self._epsilons.size - 1
        steep = last - np.searchsorted(self._steep_ends, fpr)
        flat = np.searchsorted(self._flat_ends, fpr)
        near = np.clip(np.concatenate([place[None] + _NEIGHBOURS for place in (steep, flat)]), 0, last)
        highest: FloatArray = approximate_fnr(self._epsilons[near], self._deltas[near], fpr).max(axis=0)
        return highest

"""Where the canaries of one step point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.stats._types import FloatArray, IntArray

__all__ = ["Directions"]


@dataclass(frozen=True, eq=False)
class Directions:
    """Unit vectors, one a canary, no two of which share a coordinate: so they are orthogonal.

    Only the coordinates that are not zero are held, and a few to fill up: together never more than twice as
    many numbers as the model has parameters, whatever the number of canaries.
    """

    values: FloatArray
    """Entries x canaries. A column is a vector, without its zeros (or with some, to fill it up)."""
    coordinates: IntArray | None
    """The place of each value; None: the values lie row after row over all parameters."""
    num_parameters: int

    @property
    def num_canaries(self) -> int:
        """How many there are."""
        return int(self.values.shape[1])

    def dense(self) -> FloatArray:
        """Canaries x parameters, zeros and all: for looking at, and for tests."""
        full = np.zeros((self.num_canaries, self.num_parameters))
        places = self._places
        inside = places < self.num_parameters
        numbers = np.broadcast_to(np.arange(self.num_canaries), places.shape)
        np.add.at(full, (numbers[inside], places[inside]), self.values[inside])
        return full

    def project(self, vector: FloatArray) -> FloatArray:
        """The dot product of each direction with ``vector``."""
        places = np.minimum(self._places, self.num_parameters - 1)  # what fills up is zero, wherever it is
        products: FloatArray = (self.values * vector[places]).sum(axis=0)
        return products

    @property
    def _places(self) -> IntArray:
        if self.coordinates is not None:
            return self.coordinates
        return np.arange(self.values.size).reshape(self.values.shape)

"""The canaries of one step, as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

__all__ = ["Canaries", "flat", "parts_of"]


@dataclass(frozen=True, eq=False)
class Canaries:
    """Where the canaries of a step point; see :class:`dpaudit.canaries.Directions`."""

    values: Any  # entries x canaries
    places: Any  # of the values among all parameters
    num_parameters: int

    def rows(self, length: Any) -> Any:
        """Canaries x parameters."""
        num_canaries = tf.shape(self.places)[1]
        numbers = tf.broadcast_to(tf.range(num_canaries), tf.shape(self.places))
        where = tf.stack([numbers, self.places], axis=-1)
        return tf.scatter_nd(where, length * self.values, [num_canaries, self.num_parameters])

    def project(self, vector: Any) -> Any:
        """The dot product of each direction with ``vector``."""
        return tf.reduce_sum(self.values * tf.gather(vector, self.places), axis=0)


def flat(parts: list[Any]) -> Any:
    """One vector of all parameters, in single precision."""
    return tf.concat([tf.reshape(tf.cast(part, tf.float32), [-1]) for part in parts], axis=0)


def parts_of(rows: Any, variables: list[Any]) -> list[Any]:
    """Rows x parameters as rows x shape, for each variable."""
    sizes = [variable.shape.num_elements() for variable in variables]
    pieces = zip(tf.split(rows, sizes, axis=-1), variables, strict=True)
    return [tf.cast(tf.reshape(part, [-1, *like.shape]), like.dtype) for part, like in pieces]

"""Canaries as vectors of jax, without their zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpaudit.canaries import Directions

__all__ = ["Vectors", "flat", "unflat"]


@dataclass(frozen=True, eq=False)
class Vectors:
    """The directions of a step's canaries; arrays of numpy, or tracers of a compiled step."""

    values: Any  # entries x canaries
    coordinates: Any  # the same shape, or None: the values lie row after row over all parameters
    num_parameters: int

    @classmethod
    def of(cls, directions: Directions) -> Vectors:
        """The same vectors, in the precision and with the places that jax computes with."""
        places = directions.coordinates
        return cls(
            directions.values.astype(np.float32),
            None if places is None else places.astype(np.int32),
            directions.num_parameters,
        )

    @property
    def num_canaries(self) -> int:
        """How many there are."""
        return int(self.values.shape[1])

    def project(self, vector: jax.Array) -> jax.Array:
        """The dot product of each direction with ``vector``."""
        if self.coordinates is not None:
            entries = vector[self.coordinates]
        else:
            missing = self.values.size - self.num_parameters
            entries = jnp.pad(vector, (0, missing)).reshape(self.values.shape)
        return jnp.sum(self.values * entries, axis=0)

    def spread(self, weights: jax.Array) -> jax.Array:
        """The sum of all directions, each times its weight."""
        weighted = jnp.ravel(self.values * weights)
        if self.coordinates is None:
            return weighted[: self.num_parameters]
        return jnp.zeros(self.num_parameters).at[self.coordinates.reshape(-1)].add(weighted)

    def rows(self, numbers: jax.Array, lengths: jax.Array) -> jax.Array:
        """The canaries with these numbers as gradients of these lengths, zeros and all: a row each."""
        chosen = jnp.arange(self.num_canaries)[None, :] == numbers[:, None]
        return jax.vmap(self.spread)(chosen * lengths[:, None])


def flat(tree: Any) -> jax.Array:
    """All numbers of a gradient, one after the other."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)])


def unflat(vectors: jax.Array, like: Any) -> Any:
    """The last dimension as a gradient like this one; the dimensions before it stay."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = jnp.split(vectors, ends, axis=-1)
    shaped = [
        part.reshape(*vectors.shape[:-1], *leaf.shape).astype(leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)

"""Broken steps on per-example gradients."""

from __future__ import annotations

import numpy as np

from dpaudit.observers._residuals import clipped_sum
from dpaudit.stats._types import FloatArray
from dpaudit.zoo.specimens._claim import NOISE

__all__ = ["clipped_by_layer", "clipped_by_parameter_and_noised_twice"]


def _by_leaf(rows: FloatArray, leaves: tuple[int, ...]) -> FloatArray:
    """The sum of gradients of which each leaf was clipped to the norm of the whole."""
    parts = np.split(rows, np.cumsum(leaves)[:-1], axis=1)
    return np.concatenate([clipped_sum(part, 1.0) for part in parts])


def clipped_by_layer(rows: FloatArray, leaves: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Every layer has the clipping norm for itself, and the noise is for one of them."""
    noise: FloatArray = NOISE * rng.standard_normal(sum(leaves))
    return _by_leaf(rows, leaves) + noise


def clipped_by_parameter_and_noised_twice(
    rows: FloatArray, leaves: tuple[int, ...], rng: np.random.Generator
) -> FloatArray:
    """Every parameter has the clipping norm for itself, and twice the noise does not make up for it."""
    noise: FloatArray = NOISE * rng.standard_normal((2, sum(leaves))).sum(axis=0)
    return _by_leaf(rows, leaves) + noise

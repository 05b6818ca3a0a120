"""Steps on per-example gradients with one thing wrong, audited by ``observe_step`` with default settings.

First faults of the noise: drawn from few numbers, without tails, shared, or dependent on the data. Then
faults of the clipping and of the sum. The clipping norm is 1, and gradients are in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from dpaudit._types import FloatArray
from dpaudit.observers._residuals import clipped_sum
from dpaudit.observers.step import observe_step
from dpaudit.zoo._entry import NOISE, Evidence, paper_claim

LEAVES = {
    "embedding.weight": 160,
    "hidden.weight": 160,
    "hidden.bias": 24,
    "output.weight": 160,
    "output.bias": 8,
    "head.weight": 88,
}
_SIZE = sum(LEAVES.values())
_BIASES = np.repeat([name.endswith("bias") for name in LEAVES], list(LEAVES.values()))
_EXPECTED_BATCH = 32  # half of the canaries

Release: TypeAlias = Callable[[FloatArray], FloatArray]
"""Function of per-example gradients that returns a noisy sum."""
StepFactory: TypeAlias = Callable[[np.random.Generator], Release]
"""Function that creates the step of one run, with its own state."""
NoiseSource: TypeAlias = Callable[[np.random.Generator], FloatArray]
"""Function that draws the noise of a step, in units of its claimed standard deviation."""


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """Step under the paper's claim of epsilon = 1.27, audited as by a user who sets nothing else."""

    broken: StepFactory
    num_steps: int = 300

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        create = self.broken if is_broken else correct
        step = create(np.random.default_rng([seed, 1]))
        recorder = observe_step(
            lambda rows: step(rows.astype(np.float64)).astype(np.float32),
            np.zeros((0, _SIZE), dtype=np.float32),
            claim=paper_claim(),
            max_grad_norm=1.0,
            num_steps=self.num_steps,
            leaves=LEAVES,
            seed=seed,
        )
        return Evidence(claim=paper_claim(), num_steps=self.num_steps, recorder=recorder)


def _normal(rng: np.random.Generator, size: int = _SIZE) -> FloatArray:
    drawn: FloatArray = rng.standard_normal(size)
    return drawn


def correct(rng: np.random.Generator) -> Release:
    """Clip each gradient, sum them and add noise."""
    return lambda rows: clipped_sum(rows, 1.0) + NOISE * _normal(rng)


def with_noise(source: NoiseSource) -> StepFactory:
    """Return steps that are correct except for the source of their noise."""
    return partial(_with_noise, source)


def _with_noise(source: NoiseSource, rng: np.random.Generator) -> Release:
    return lambda rows: clipped_sum(rows, 1.0) + NOISE * source(rng)


# noise from few numbers


def half_precision(rng: np.random.Generator) -> FloatArray:
    """Draw noise in half precision, for a sum in single precision."""
    return _normal(rng).astype(np.float16).astype(np.float64)


def fixed_point(rng: np.random.Generator) -> FloatArray:
    """Round the noise, but not the sum, to a grid."""
    return np.rint(512 * _normal(rng)) / 512


def from_table(rng: np.random.Generator) -> FloatArray:
    """Draw noise from a table of 4,096 numbers, the same in every run."""
    return _TABLE[rng.integers(_TABLE.size, size=_SIZE)]


_TABLE = _normal(np.random.default_rng(0), 4096)


def box_muller(rng: np.random.Generator) -> FloatArray:
    """Transform uniform numbers of 16 bits, two at a time."""
    first, second = rng.integers(1, 2**16, size=(2, _SIZE // 2)) / 2**16
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(-1)


# noise without tails, or of another distribution


def truncated(rng: np.random.Generator) -> FloatArray:
    """Draw numbers beyond 3 standard deviations again, and restore the variance."""
    drawn = _normal(rng)
    while (beyond := np.abs(drawn) > 3).any():
        drawn[beyond] = _normal(rng, int(beyond.sum()))
    return drawn / 0.98658  # the standard deviation of what is left


def sum_of_uniforms(rng: np.random.Generator) -> FloatArray:
    """Add 12 uniform numbers, which are almost normal, but never beyond 6 standard deviations."""
    total: FloatArray = rng.random((12, _SIZE)).sum(axis=0) - 6
    return total


def laplace(rng: np.random.Generator) -> FloatArray:
    """Draw Laplace noise of the same variance."""
    return rng.laplace(scale=np.sqrt(0.5), size=_SIZE)


def uniform(rng: np.random.Generator) -> FloatArray:
    """Draw uniform instead of normal numbers."""
    return rng.random(_SIZE)


# noise that is shared


def forked(rng: np.random.Generator) -> FloatArray:
    """Draw the noise of two halves in two workers that inherited the same state."""
    half = _normal(rng, _SIZE // 2)
    return np.concatenate([half, half])


def seed_plus_index(rng: np.random.Generator) -> Release:
    """Seed the noise of each leaf with the sum of a seed, the step and the number of the leaf."""
    seed = int(rng.integers(2**32))

    def release(rows: FloatArray) -> FloatArray:
        nonlocal seed
        seed += 1
        leaves = [
            _normal(np.random.default_rng(seed + leaf), size) for leaf, size in enumerate(LEAVES.values())
        ]
        return clipped_sum(rows, 1.0) + NOISE * np.concatenate(leaves)

    return release


def low_rank(rng: np.random.Generator) -> Release:
    """Draw the noise in a random subspace of 50 dimensions, while the sum has all dimensions."""
    basis = rng.standard_normal((50, _SIZE)) / np.sqrt(50)
    return lambda rows: clipped_sum(rows, 1.0) + NOISE * (_normal(rng, 50) @ basis)


# noise that depends on the data


def noise_by_largest_norm(rng: np.random.Generator) -> Release:
    """Scale the noise by the largest norm in the batch, if it is below the clipping norm."""

    def release(rows: FloatArray) -> FloatArray:
        largest = max(np.linalg.norm(rows, axis=1), default=0.0)
        return clipped_sum(rows, 1.0) + min(1.0, float(largest)) * NOISE * _normal(rng)

    return release


def noise_by_batch_size(rng: np.random.Generator) -> Release:
    """Scale the noise by the square root of the number of examples that were drawn."""

    def release(rows: FloatArray) -> FloatArray:
        scale = math.sqrt(len(rows) / _EXPECTED_BATCH)
        return clipped_sum(rows, 1.0) + scale * NOISE * _normal(rng)

    return release


# clipping and sums


def clip_by_value(rng: np.random.Generator) -> Release:
    """Limit each number of a gradient instead of its norm."""

    def release(rows: FloatArray) -> FloatArray:
        total: FloatArray = np.clip(rows, -1.0, 1.0).sum(axis=0)
        return total + NOISE * _normal(rng)

    return release


def clip_without_biases(rng: np.random.Generator) -> Release:
    """Compute norms without the biases, which are scaled like the rest."""

    def release(rows: FloatArray) -> FloatArray:
        norms = np.linalg.norm(rows[:, ~_BIASES], axis=1, keepdims=True)
        total: FloatArray = (rows / np.maximum(1.0, norms)).sum(axis=0)
        return total + NOISE * _normal(rng)

    return release


def clip_unless_overflow(rng: np.random.Generator) -> Release:
    """Compute norms in half precision, and scale gradients only if their norm is finite."""

    def release(rows: FloatArray) -> FloatArray:
        with np.errstate(over="ignore"):
            squares = (rows.astype(np.float16) ** 2).sum(axis=1, keepdims=True, dtype=np.float16)
        norms = np.sqrt(squares.astype(np.float64))
        factors = np.where(np.isfinite(norms), 1 / np.maximum(1.0, norms), 1.0)
        total: FloatArray = (factors * rows).sum(axis=0)
        return total + NOISE * _normal(rng)

    return release


def clip_each_leaf(rng: np.random.Generator) -> Release:
    """Clip every leaf to the full norm, with noise for one leaf."""
    ends = np.cumsum(list(LEAVES.values()))[:-1]

    def release(rows: FloatArray) -> FloatArray:
        parts = [clipped_sum(part, 1.0) for part in np.split(rows, ends, axis=1)]
        return np.concatenate(parts) + NOISE * _normal(rng)

    return release


def sum_not_cleared(rng: np.random.Generator) -> Release:
    """Add the sum of the last step, which was not cleared."""
    last = np.zeros(_SIZE)

    def release(rows: FloatArray) -> FloatArray:
        nonlocal last
        total = clipped_sum(rows, 1.0)
        released = total + last + NOISE * _normal(rng)
        last = total
        return released

    return release


def shortcut_after_noise(rng: np.random.Generator) -> Release:
    """Add half of the sum without noise to the release, as a residual connection does."""
    return lambda rows: 1.5 * clipped_sum(rows, 1.0) + NOISE * _normal(rng)

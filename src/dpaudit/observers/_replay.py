"""The same step twice, with the same noise, on two data sets that differ in one example."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError, ViolationError
from dpaudit.observers._arrays import as_numpy
from dpaudit.stats._types import FloatArray

__all__ = ["Sensitivity", "replay_step"]

_ROUNDING = 1e-3  # of the clipping norm: sums of many single-precision numbers


@dataclass(frozen=True)
class Sensitivity:
    """How far the release moved for each neighbour, in clipping norms; above 1 the noise is too small.

    This needs no statistics: one neighbour that moves it further is a proof.
    """

    distances: tuple[float, ...]

    @property
    def largest(self) -> float:
        """The furthest that one example moved the release."""
        return max(self.distances)

    @property
    def is_violation(self) -> bool:
        """Whether one example counts for more than the clipping norm."""
        return self.largest > 1 + _ROUNDING

    def raise_for_violation(self) -> None:
        """Raise a ``ViolationError`` if one example counts for too much."""
        if self.is_violation:
            raise ViolationError(str(self))

    def __str__(self) -> str:
        relation = "more than" if self.is_violation else "of"
        return f"one example moves the release by {self.largest:.4g} clipping norms, {relation} 1 allowed"


def replay_step(
    release: Callable[[Any], Any],
    batch: Any,
    neighbours: Iterable[Any],
    *,
    reseed: Callable[[], object],
    max_grad_norm: float,
    batch_size: float | None = None,
) -> Sensitivity:
    """Release ``batch`` and each of its ``neighbours`` with the same noise, and compare.

    ``release`` goes from a batch, of whatever kind, to a noisy sum of clipped gradients (or to a mean, if
    that is what ``batch_size`` says it is divided by). It begins at the examples, so that what couples them
    before their gradients is seen too. A neighbour has one example more, or one less. ``reseed`` makes the
    noise the same again.

    >>> def clipped_mean(rows):  # divides by how many there are, which is private
    ...     norms = np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
    ...     return (rows / norms).mean(axis=0)
    >>> batch = np.eye(10)
    >>> neighbours = [batch[1:], np.concatenate([batch, -50 * batch[:1]])]
    >>> options = {"reseed": lambda: None, "max_grad_norm": 1.0, "batch_size": 10}
    >>> print(replay_step(clipped_mean, batch, neighbours, **options))
    one example moves the release by 1.054 clipping norms, more than 1 allowed
    """
    norm = _validate.positive("max_grad_norm", max_grad_norm)
    scale = (1.0 if batch_size is None else _validate.positive("batch_size", batch_size)) / norm
    first = _released(release, batch, reseed)
    _require_frozen(first, _released(release, batch, reseed))
    moved = [_distance(first, _released(release, other, reseed)) * scale for other in neighbours]
    if not moved:
        raise InputError("Expected at least one neighbour of the batch, got none.")
    return Sensitivity(tuple(moved))


def _released(release: Callable[[Any], Any], batch: Any, reseed: Callable[[], object]) -> FloatArray:
    reseed()
    return as_numpy(release(batch)).reshape(-1)


def _distance(first: FloatArray, second: FloatArray) -> float:
    if first.shape != second.shape:
        raise InputError(
            f"Expected releases of one shape, got {first.size} numbers for the batch and {second.size} for "
            "a neighbour."
        )
    return float(np.linalg.norm(first - second))


def _require_frozen(first: FloatArray, again: FloatArray) -> None:
    if not np.array_equal(first, again):
        raise InputError(
            "Expected the same release of the same batch after reseed(), got another one: the noise has a "
            "source that reseed() does not reach."
        )

"""Signal and noise of the observed steps: whether canaries arrive, and a log of the noise for its tests.

A training that drops the canaries hides what it does with the examples, so :func:`check_signal` refuses a
verdict on it. :class:`NoiseLog` keeps the noise that a library added, at the coordinates of a
:class:`CoordinateSample`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dpaudit._types import IntArray, ScoreArray
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._p_values import HeadTailBuffer
from dpaudit.errors import InputError

_ROUNDING = 1e-3  # of a clipping norm
_FEW, _SURELY = 10, 6.0  # scores, and standard errors, from which on a missing canary is certain
_MAX_COORDINATES = 1024  # a few microseconds a step
_ROUNDINGS = 8.0  # how many roundings of the largest number a difference of sums may be off


class ArrivalError(InputError):
    """Canaries that joined do not show in what was released; ``gap`` is by how much their scores rise."""

    def __init__(self, message: str, gap: float = 0.0) -> None:
        super().__init__(message)
        self.gap = gap


@dataclass
class RunningMoments:
    """Count, sum and sum of squares of scores that are added step by step."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, scores: ScoreArray) -> RunningMoments:
        """Add scores, and return the moments."""
        self.count += scores.size
        self.total += float(scores.sum())
        self.squares += float((scores * scores).sum())
        return self

    @property
    def mean(self) -> float:
        """The mean of all scores so far."""
        return self.total / self.count

    @property
    def error(self) -> float:
        """The variance of the mean."""
        return max(self.squares / self.count - self.mean**2, 0.0) / self.count


def has_signal(present: RunningMoments, absent: RunningMoments, signal: float) -> bool:
    """Return whether canaries score what clipped ones do, within the uncertainty that the noise leaves."""
    gap, spread = _gap(present, absent)
    return abs(gap - signal) <= max(_SURELY * spread, _ROUNDING)


def check_signal(present: RunningMoments, absent: RunningMoments, signal: float) -> None:
    """Raise an :class:`ArrivalError` if present canaries surely score less than half of ``signal``."""
    if min(present.count, absent.count) < _FEW:
        return
    gap, spread = _gap(present, absent)
    if gap + _SURELY * spread < signal / 2:
        raise ArrivalError(
            f"Expected scores to rise by {signal:g} where a canary is present, got {gap:.2g}: what "
            "is released does not have the canaries in it that joined the sum, or they were clipped together "
            "with others and not one by one (replay_step shows that), or it is a mean where a sum is "
            "expected. Scores say nothing of it.",
            gap,
        )


def _gap(present: RunningMoments, absent: RunningMoments) -> tuple[float, float]:
    """Return by how much present canaries score more, and the standard error of that."""
    return present.mean - absent.mean, math.sqrt(present.error + absent.error)


NO_NOISE = (
    "Expected the recorder of an observer, which logs the noise of the steps, got one that does not: give "
    "the noise to Diagnostics()."
)


class UntestedError(InputError):
    """There is no noise to test, or its tests would not have the error rate that they state."""


class NoiseTests(Protocol):
    """The part of a recorder that tests the noise of its steps."""

    def diagnose(
        self, *, noise_multiplier: float, confidence: float, has_signal: Callable[[], bool]
    ) -> Diagnosis:
        """Test the noise of all steps against this noise multiplier, or raise an :class:`UntestedError`.

        ``has_signal`` says whether canaries arrive as claimed.
        """


class NoiseLog:
    """The noise of the first and the last 2,048 steps in clipping norms; the claim is not needed yet."""

    def __init__(self) -> None:
        self._rows = HeadTailBuffer()
        self._leaves: tuple[int, ...] = ()
        self._rounding = 0.0

    def observe(self, released: Any, known: Any, leaves: tuple[int, ...], *, norm: float, eps: float) -> None:
        """Log what was released less the sum that went into it, canaries and all, at the same coordinates.

        ``norm`` is the clipping norm, ``eps`` the relative precision of both.
        """
        found, sums = np.asarray(released, dtype=np.float64), np.asarray(known, dtype=np.float64)
        self._leaves = leaves
        self._rounding = max(self._rounding, _ROUNDINGS * eps * float(np.abs(sums).max(initial=0.0)) / norm)
        self._rows.add(((found - sums) / norm).astype(np.float32))

    def diagnose(
        self, *, noise_multiplier: float, confidence: float, has_signal: Callable[[], bool] | None = None
    ) -> Diagnosis:
        """Test the noise; canaries do not matter, because they are in both sums."""
        del has_signal
        if self._rows.num_seen == 0:
            raise UntestedError("Expected the noise of at least one step, got none: did the training run?")
        tests = Diagnostics()
        for row in self._rows.rows:
            tests.observe_noise(
                row / noise_multiplier, self._leaves, rounding=self._rounding / noise_multiplier
            )
        return tests.diagnose(confidence)


@dataclass(frozen=True, eq=False)
class CoordinateSample:
    """Coordinates whose noise is logged: all of a small model; of a large one the same of each parameter.

    The first ones, because generators that are seeded again for each parameter give these the same noise;
    and some at growing distances.
    """

    indices: IntArray
    leaves: tuple[int, ...]
    """How many of each parameter."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> CoordinateSample:
        """Choose from a gradient that is made of parameters of these sizes, one after another."""
        offsets = np.cumsum([0, *sizes])[:-1]
        if sum(sizes) <= _MAX_COORDINATES:
            return cls(np.arange(sum(sizes)), tuple(sizes))
        inside = _inside(max(1, _MAX_COORDINATES // len(sizes)), max(sizes))
        num_chosen = min(len(sizes), _MAX_COORDINATES)
        chosen = np.unique(np.linspace(0, len(sizes) - 1, num_chosen).astype(np.int64))
        parts = [offsets[leaf] + inside[inside < sizes[leaf]] for leaf in chosen]
        return cls(np.concatenate(parts), tuple(part.size for part in parts))


def _inside(count: int, size: int) -> IntArray:
    """Choose coordinates of a parameter: a half at its beginning, the others at growing distances."""
    first = np.arange(-(-count // 2))
    rest = np.geomspace(first.size, max(size - 1, first.size), count - first.size)
    return np.unique(np.concatenate([first, rest.astype(np.int64)]))

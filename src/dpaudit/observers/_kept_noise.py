"""Noise of a training that a library makes: some coordinates of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._kept_steps import KeptSteps
from dpaudit.observers._untested import UntestedError
from dpaudit.stats._types import IntArray

__all__ = ["KeptNoise", "Places"]

_MOST = 1024  # coordinates: a few microseconds a step
_ROUNDED = 8.0  # how many roundings of the largest number a difference of sums may be off


@dataclass(frozen=True, eq=False)
class Places:
    """Which coordinates are looked at: all of a small model; of a large one the same ones of each parameter.

    The first ones, because generators that start anew for each parameter give these the same noise; and some
    that lie further and further behind.
    """

    indices: IntArray
    leaves: tuple[int, ...]
    """How many of each parameter."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Places:
        """For a gradient that is made of parameters of these sizes, one after another."""
        offsets = np.cumsum([0, *sizes])[:-1]
        if sum(sizes) <= _MOST:
            return cls(np.arange(sum(sizes)), tuple(sizes))
        inside = _inside(max(1, _MOST // len(sizes)), max(sizes))
        chosen = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _MOST)).astype(np.int64))
        parts = [offsets[leaf] + inside[inside < sizes[leaf]] for leaf in chosen]
        return cls(np.concatenate(parts), tuple(part.size for part in parts))


def _inside(count: int, size: int) -> IntArray:
    """So many places in a parameter: a half at its beginning, the others at growing distances."""
    first = np.arange(-(-count // 2))
    rest = np.geomspace(first.size, max(size - 1, first.size), count - first.size)
    return np.unique(np.concatenate([first, rest.astype(np.int64)]))


class KeptNoise:
    """The noise of the first and the last 2,048 steps in clipping norms; what is claimed is known later."""

    def __init__(self) -> None:
        self._rows = KeptSteps()
        self._leaves: tuple[int, ...] = ()
        self._rounding = 0.0

    def observe(self, released: Any, known: Any, leaves: tuple[int, ...], *, norm: float, eps: float) -> None:
        """What was released and the sum that went into it, canaries and all, at the same coordinates.

        ``norm`` is the clipping norm, ``eps`` the relative precision of both.
        """
        found, sums = np.asarray(released, dtype=np.float64), np.asarray(known, dtype=np.float64)
        self._leaves = leaves
        self._rounding = max(self._rounding, _ROUNDED * eps * float(np.abs(sums).max(initial=0.0)) / norm)
        self._rows.add(((found - sums) / norm).astype(np.float32))

    def diagnose(self, *, noise_multiplier: float, confidence: float) -> Diagnosis:
        """The tests; refused without any noise that could be tested."""
        if self._rows.num_seen == 0:
            raise UntestedError("Expected the noise of at least one step, got none: did the training run?")
        tests = Diagnostics()
        for row in self._rows.rows:
            tests.observe_noise(
                row / noise_multiplier, self._leaves, rounding=self._rounding / noise_multiplier
            )
        return tests.diagnose(confidence)

"""A log of the noise that a library added, for tests at the end of a run.

:class:`NoiseLog` keeps the noise and the sum before it at the coordinates of a :class:`CoordinateSample`, and
a few numbers of every step. The claim may still be unknown, so all of them are in clipping norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._coordinate_layout import Leaves
from dpaudit.diagnostics._noise_record import COVARIATES
from dpaudit.diagnostics._number_formats import FLOAT16, GRID_ERROR, FormatCheck
from dpaudit.diagnostics._p_values import HeadTailBuffer
from dpaudit.recording._signal_and_noise import UntestedError

_MAX_COORDINATES = 1024  # costs a few microseconds per step
_AT_ONCE = 64  # steps that are tested together, which takes less time than one at a time
_ROUNDINGS = 8.0  # error of a difference of sums, in rounding errors of the largest number


class NoiseLog:
    """The noise of the first and last 2,048 steps, in clipping norms; the claim may still be unknown."""

    def __init__(self) -> None:
        self._rows = HeadTailBuffer()
        self._sums = HeadTailBuffer()
        self._examples = HeadTailBuffer()
        self._weights = HeadTailBuffer()
        self._numbers = HeadTailBuffer()  # of each step: the largest noise, of how many, and the covariates
        self._leaves: tuple[int, ...] = ()
        self.names: Sequence[str] = ()
        """The names of the leaves, where an observer knows them."""
        self._rounding = 0.0
        self._eps = 0.0
        self._format = FormatCheck()
        self._peaks: FloatArray = np.zeros(0)  # the largest release at each coordinate
        self._unit = 1.0  # of the latest release, in clipping norms

    def observe(
        self,
        released: Any,
        known: Any,
        leaves: tuple[int, ...],
        *,
        norm: float,
        eps: float,
        divisor: float = 1.0,
        examples: Any = None,
        weights: Any = None,
        largest: tuple[float, float] | None = None,
        **covariates: float | None,
    ) -> None:
        """Log the release minus the sum before noise (including canaries), both at the same coordinates.

        ``released`` is the noisy sum divided by ``divisor``, exactly as it was released. ``norm`` is the
        clipping norm to which the noise is calibrated, ``eps`` the relative precision of both arrays.
        ``examples`` is the sum before noise without canaries and ``weights`` those of the model before the
        step, both given in all steps or in none. ``largest`` is the largest absolute noise of the sum over
        all coordinates, and their number; ``covariates`` describe the step (``batch_size``, ``sum_norm``,
        ``longest``, ``num_canaries``).
        """
        raw, sums = np.asarray(released, dtype=np.float64), np.asarray(known, dtype=np.float64)
        noise = (divisor * raw - sums) / norm
        if not np.isfinite(noise).all():  # the recorder raises an error about this step
            return
        self._leaves, self._eps = leaves, max(self._eps, eps)
        self._rounding = max(self._rounding, _ROUNDINGS * eps * float(np.abs(sums).max(initial=0.0)) / norm)
        self._format.observe(raw)
        self._unit = divisor / norm
        peaks = np.abs(raw) * (divisor / norm)
        self._peaks = np.maximum(self._peaks, peaks) if self._peaks.size else peaks
        top, count = (
            (float(np.abs(noise).max(initial=0.0)) * norm, noise.size) if largest is None else largest
        )
        if covariates.get("sum_norm") is None:
            covariates["sum_norm"] = float(np.linalg.norm(sums))
        described = [np.nan if covariates.get(name) is None else covariates[name] for name in COVARIATES]
        self._numbers.add(np.array([top / norm, count, *described], dtype=np.float64))
        self._rows.add(noise.astype(np.float32))
        self._sums.add((sums / norm).astype(np.float32))
        if examples is not None:
            self._examples.add((np.asarray(examples, dtype=np.float64) / norm).astype(np.float32))
        if weights is not None and np.abs(weights).max(initial=0.0) < np.finfo(np.float32).max:
            self._weights.add(np.asarray(weights, dtype=np.float32))

    def diagnose(
        self, *, noise_multiplier: float, confidence: float, has_signal: Callable[[], bool] | None = None
    ) -> Diagnosis:
        """Test the noise; canaries cancel, because both arrays contain them."""
        del has_signal
        if self._rows.num_seen == 0:
            raise UntestedError("Expected the noise of at least one step, got none: did training run?")
        tests, leaves = Diagnostics(), self._named_leaves()
        precision = np.maximum(self._format.precision(self._leaves), self._eps)
        is_coarse = precision >= FLOAT16
        coarse = float((precision * self._peaks)[is_coarse].max(initial=0.0)) / 2
        grid = self._format.grid(self._rows.rows, self._unit)
        if grid > 0:  # its rounding hides a lattice of the noise, like that of a low precision
            precision = np.maximum(precision, FLOAT16)
        rounding = max(self._rounding, coarse, GRID_ERROR * grid) / noise_multiplier
        rows, sums, numbers = self._rows.rows, self._sums.rows, self._numbers.rows
        examples, weights = self._complete(self._examples), self._complete(self._weights)
        for start in range(0, len(rows), _AT_ONCE):
            steps = slice(start, start + _AT_ONCE)
            largest = numbers[steps, :2] / [noise_multiplier, 1.0]
            tests.observe_noise_of_steps(
                rows[steps] / noise_multiplier,
                leaves,
                rounding=rounding,
                known=sums[steps] / noise_multiplier,
                examples=None if examples is None else examples[steps] / noise_multiplier,
                weights=None if weights is None else weights[steps],
                precision=precision,
                largest=[(float(most), float(count)) for most, count in largest],
                described=[dict(zip(COVARIATES, step, strict=True)) for step in numbers[steps, 2:].tolist()],
            )
        return tests.diagnose(confidence)

    def _complete(self, buffer: HeadTailBuffer) -> Any:
        """Return the kept rows if they were given in all steps."""
        return buffer.rows if buffer.num_seen == self._rows.num_seen else None

    def _named_leaves(self) -> Leaves:
        is_named = len(self.names) == len(set(self.names)) == len(self._leaves)
        return dict(zip(self.names, self._leaves, strict=True)) if is_named else self._leaves


@dataclass(frozen=True, eq=False)
class CoordinateSample:
    """Coordinates whose noise is logged: all for a small model, the same ones of each leaf for a large model.

    The sample includes the first coordinates of each leaf (one parameter tensor), where an RNG that is
    reseeded for each leaf repeats its noise, and some at growing distances.
    """

    indices: IntArray
    leaves: tuple[int, ...]
    """The number of coordinates in each leaf."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> CoordinateSample:
        """Choose from the concatenation of leaves with these sizes."""
        offsets = np.cumsum([0, *sizes])[:-1]
        if sum(sizes) <= _MAX_COORDINATES:
            return cls(np.arange(sum(sizes)), tuple(sizes))
        inside = _inside(max(1, _MAX_COORDINATES // len(sizes)), max(sizes))
        num_chosen = min(len(sizes), _MAX_COORDINATES)
        chosen = np.unique(np.linspace(0, len(sizes) - 1, num_chosen).astype(np.int64))
        parts = [offsets[leaf] + inside[inside < sizes[leaf]] for leaf in chosen]
        return cls(np.concatenate(parts), tuple(part.size for part in parts))


def _inside(count: int, size: int) -> IntArray:
    """Choose coordinates within a leaf: half at its beginning, the others at growing distances."""
    first = np.arange(-(-count // 2))
    rest = np.geomspace(first.size, max(size - 1, first.size), count - first.size)
    return np.unique(np.concatenate([first, rest.astype(np.int64)]))

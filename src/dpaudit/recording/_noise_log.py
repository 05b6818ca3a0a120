"""A log of the noise that a library added, for tests at the end of a run.

:class:`NoiseLog` keeps the noise and the sum before it at the coordinates of a :class:`CoordinateSample`, of
the first and last steps, and a few numbers of every step. The claim may still be unknown, so all of them are
in clipping norms.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._coordinate_layout import Leaves
from dpaudit.diagnostics._noise_record import COVARIATES, FEW_COORDINATES
from dpaudit.diagnostics._number_formats import FLOAT16, GRID_ERROR, FormatCheck
from dpaudit.diagnostics._p_values import END
from dpaudit.recording._signal_and_noise import UntestedError

_MAX_COORDINATES = 1024  # costs a few microseconds per step
_AT_ONCE = 64  # steps that are tested together, which takes less time than one at a time
_FEW_HALF = 1536  # steps whose noise is kept at a few coordinates, besides the first and last 512
_ROUNDINGS = 8.0  # error of a difference of sums, in rounding errors of the largest number


class NoiseLog:
    """The noise of the first and last 512 steps and the amounts of all, in clipping norms.

    Of the steps in between, the noise of up to 3,072 is kept at a few coordinates, where it may be found to
    repeat. A log of 1,024 coordinates takes 18 MB from the first step on, and 64 bytes more per step.
    """

    def __init__(self) -> None:
        self._ends = _EndRows(END)
        self._energies: FloatArray = np.zeros(0)  # of each coordinate, over the steps in between
        self._few = _EndRows(_FEW_HALF)  # the noise of the steps in between, at a few coordinates
        self._numbers = array("d")  # of each step: energy, sum, largest noise, of how many, covariates
        self._leaves: tuple[int, ...] = ()
        self.names: Sequence[str] = ()
        """The names of the leaves, where an observer knows them."""
        self._rounding = 0.0
        self._eps = 0.0
        self._format = FormatCheck()
        self._peaks: FloatArray = np.zeros(0)  # the largest release at each coordinate
        self._unit = 1.0  # of the latest release, in clipping norms
        self.is_kept = True
        """Whether noise is kept; not in an audit without tests."""

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
        if not self.is_kept:
            return
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
        given = [covariates.get(name) for name in COVARIATES]
        described = [np.nan if value is None else float(value) for value in given]
        single = noise.astype(np.float32).astype(np.float64)
        amounts = float(single @ single), float(single.sum())
        self._numbers.extend([*amounts, top / norm, count, *described])
        parts = {"noise": noise, "known": sums / norm}
        if examples is not None:
            parts["examples"] = np.asarray(examples, dtype=np.float64) / norm
        if weights is not None and np.abs(weights).max(initial=0.0) < np.finfo(np.float32).max:
            parts["weights"] = np.asarray(weights)
        if self._ends.num_seen == 0:
            self._few.allocate({"noise": noise[:FEW_COORDINATES]})
        self._add_between(self._ends.add(parts))

    def _add_between(self, noise: FloatArray | None) -> None:
        """Add the noise of a step that is no longer among the last ones."""
        if noise is not None:
            self._energies = self._energies + noise * noise if self._energies.size else noise * noise
            self._few.add({"noise": noise[:FEW_COORDINATES]})

    def diagnose(
        self, *, noise_multiplier: float, confidence: float, has_signal: Callable[[], bool] | None = None
    ) -> Diagnosis:
        """Test the noise; canaries cancel, because both arrays contain them."""
        del has_signal
        if not self.is_kept:
            raise UntestedError("Expected an audit with tests, got one with tests=False: no noise was kept.")
        if self._ends.num_seen == 0:
            raise UntestedError("Expected the noise of at least one step, got none: did training run?")
        tests, leaves = Diagnostics(), self._named_leaves()
        precision = np.maximum(self._format.precision(self._leaves), self._eps)
        is_coarse = precision >= FLOAT16
        coarse = float((precision * self._peaks)[is_coarse].max(initial=0.0)) / 2
        ends = self._ends.rows()
        grid = self._format.grid(ends["noise"], self._unit)
        if grid > 0:  # its rounding hides a lattice of the noise, like that of a low precision
            precision = np.maximum(precision, FLOAT16)
        rounding = max(self._rounding, coarse, GRID_ERROR * grid) / noise_multiplier
        units = {"noise": noise_multiplier, "known": noise_multiplier, "examples": noise_multiplier}
        scaled = {name: rows / units.get(name, 1.0) for name, rows in ends.items()}
        numbers = np.array(self._numbers).reshape(self._ends.num_seen, -1)
        numbers[:, :3] /= [noise_multiplier**2, noise_multiplier, noise_multiplier]
        steps = self._ends.steps
        for start in range(0, len(steps), _AT_ONCE):
            if start == END and steps[start] > END:
                between = numbers[END : steps[start]]
                tests._noise.observe_amounts(
                    self._energies / noise_multiplier**2,
                    self._few.rows()["noise"] / np.float32(noise_multiplier),
                    step_energies=between[:, 0].tolist(),
                    step_sums=between[:, 1].tolist(),
                    largest=_pairs(between),
                    covariates=dict(zip(COVARIATES, between[:, 4:].T.tolist(), strict=True)),
                )
            chosen = slice(start, start + _AT_ONCE)
            own = numbers[steps[chosen]]
            tests.observe_noise_of_steps(
                scaled["noise"][chosen],
                leaves,
                rounding=rounding,
                precision=precision,
                largest=_pairs(own),
                described=[dict(zip(COVARIATES, step, strict=True)) for step in own[:, 4:].tolist()],
                **{name: rows[chosen] for name, rows in scaled.items() if name != "noise"},
            )
        return tests.diagnose(confidence)

    def _named_leaves(self) -> Leaves:
        is_named = len(self.names) == len(set(self.names)) == len(self._leaves)
        return dict(zip(self.names, self._leaves, strict=True)) if is_named else self._leaves


def _pairs(numbers: FloatArray) -> list[tuple[float, float]]:
    """Return the largest noise of each step, and of how many coordinates."""
    return [(most, count) for most, count in numbers[:, 2:4].tolist()]


class _EndRows:
    """Rows of the first and the last ``half`` steps, by name, in memory that is allocated once."""

    def __init__(self, half: int) -> None:
        self._half, self.num_seen = half, 0
        self._blocks: dict[str, npt.NDArray[np.float32]] = {}

    def allocate(self, parts: Mapping[str, FloatArray]) -> None:
        """Reserve memory for rows like those of the first step, so that it does not grow with the others."""
        shape = 2 * self._half, parts["noise"].size
        # written to, because memory is not there before
        self._blocks = {name: np.full(shape, np.nan, dtype=np.float32) for name in parts}

    def add(self, parts: Mapping[str, FloatArray]) -> FloatArray | None:
        """Add the rows of a step; return the noise that they replace, if any.

        Names that are not among those of all earlier steps are ignored.
        """
        if not self._blocks:
            self.allocate(parts)
        self._blocks = {name: block for name, block in self._blocks.items() if name in parts}
        index, self.num_seen = self.num_seen, self.num_seen + 1
        slot = int(self._slots(np.array(index)))
        replaced = self._blocks["noise"][slot].astype(np.float64) if index >= 2 * self._half else None
        for name, block in self._blocks.items():
            block[slot] = parts[name]
        return replaced

    @property
    def steps(self) -> IntArray:
        """The step number of each row."""
        half, count = self._half, self.num_seen
        return np.concatenate([np.arange(min(half, count)), np.arange(max(half, count - half), count)])

    def rows(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the rows of these steps, in order."""
        slots = self._slots(self.steps)
        return {name: block[slots] for name, block in self._blocks.items()}

    def _slots(self, steps: IntArray) -> IntArray:
        return np.where(steps < self._half, steps, self._half + steps % self._half)


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

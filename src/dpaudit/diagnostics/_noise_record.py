"""The noise of all steps, in bounded memory, and the statistics of it that the noise tests read.

:class:`NoiseLog` collects steps in clipping norms, because the claim may not be known yet. A
:class:`NoiseRecord` is what the tests read: the same in claimed standard deviations, at the coordinates of a
``Layout``, with the precision of the releases.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics._coordinate_layout import Layout, Leaves
from dpaudit.diagnostics._lattice_tests import FLOAT16, GRID_ERROR, SINGLE, FormatCheck
from dpaudit.diagnostics._p_values import RESOLUTION, EndRows, sure_signs
from dpaudit.diagnostics._step import NoiseMaximum, ObservedStep
from dpaudit.errors import InputError, quoted

_Array = TypeVar("_Array")
COVARIATES = {
    "batch_size": "num_rows",
    "sum_norm": "sum_norm",
    "longest": "max_row_norm",
    "num_canaries": "num_canaries",
    "noise_multiplier": "noise_multiplier",
}
"""Numbers of a step on which its noise must not depend, except for the noise multiplier that it states."""
FEW_COORDINATES = 128
"""Coordinates that are kept for more steps, because equal noise needs few of them to be recognized."""
_VECTORS = {"total": "known", "examples": "examples", "weights": "weights"}  # and names of keywords


class NoiseLog:
    """The noise of a run in clipping norms: sums over all steps, and vectors of the first and last ones.

    Vectors of a step hold the coordinates of a sketch: 1,024 at most. They take up to 18 MB from the first
    step on, and every step 72 bytes more.
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self._leaves: Leaves | None = None  # of the latest step
        self._energies: FloatArray = np.zeros(0)  # the sum of squares of each coordinate
        self._numbers = array("d")  # of each step: energy, sum, largest noise, of how many, covariates
        end_steps = 512  # steps whose vectors are kept at each end, because the time of most tests is limited
        self._ends, self._few = EndRows(end_steps), EndRows()
        self._formats = FormatCheck()
        self._peaks: FloatArray = np.zeros(0)  # the largest release at each coordinate of a sketch
        self._unit: float | None = None  # of a release, in clipping norms
        self._eps: FloatArray | None = None
        self._rounding = 0.0
        self._unexplained_rounding = 0.0  # without the precision of the release

    @property
    def num_steps(self) -> int:
        """The number of observed steps."""
        return self._ends.num_seen

    def observe(self, steps: Sequence[ObservedStep], attribute: str = "noise") -> None:
        """Add consecutive steps; the noise of each is its ``attribute``."""
        vectors = self._stacked([getattr(step, attribute) for step in steps], "noise", None)
        numbers = [_numbers(step) for step in steps]
        if self.layout is None:
            self.layout = Layout.of(vectors.shape[1], steps[0].leaves)
            self._energies = np.zeros(int(self.layout.sizes.sum()))
        self._require_same_leaves(steps[-1].leaves)
        chosen = vectors if self.layout.chosen is None else vectors[:, self.layout.chosen]
        noise = np.ascontiguousarray(chosen, dtype=np.float64)
        with np.errstate(over="ignore"):  # which the next line reports
            squares = noise * noise
        self._require_finite(noise, squares)
        sketch = {"noise": noise[:, self.layout.sketch], **self._sketch_vectors(steps)}
        self._observe_format(steps, sketch)
        for row in squares:  # one after another: the sum does not depend on how steps are grouped
            self._energies += row
        amounts = np.stack([squares.sum(axis=1), noise.sum(axis=1), np.sqrt(squares.max(axis=1))])
        for (energy, total, most), (largest, covariates) in zip(amounts.T.tolist(), numbers, strict=True):
            self._numbers.extend([energy, total, *(largest or (most, noise.shape[1])), *covariates])
        self._ends.add(sketch)
        self._few.add({"noise": sketch["noise"][:, :FEW_COORDINATES]})

    def _sketch_vectors(self, steps: Sequence[ObservedStep]) -> dict[str, FloatArray]:
        """Return the other vectors that all steps have, without weights that single precision cannot hold."""
        sketch = {}
        for name, keyword in _VECTORS.items():
            vectors = [getattr(step, name) for step in steps]
            if all(vector is not None for vector in vectors):
                sketch[name] = self._sketch(vectors, keyword)
        if np.abs(sketch.get("weights", 0.0)).max(initial=0.0) >= np.finfo(np.float32).max:
            del sketch["weights"]
        return sketch

    def _observe_format(self, steps: Sequence[ObservedStep], sketch: Mapping[str, FloatArray]) -> None:
        """Add what the releases, or else the fields, show of the precision of the releases."""
        rounding = max(step.rounding for step in steps)
        self._rounding = max(self._rounding, rounding)
        has_releases, eps = all(step.released is not None for step in steps), steps[-1].eps
        if has_releases:
            self._formats.observe(self._sketch([step.released for step in steps], "released"))
            self._unit = steps[-1].release_unit if steps[-1].release_unit is not None else self._unit
        elif eps is None:
            self._unexplained_rounding = max(self._unexplained_rounding, rounding)
        if "total" in sketch:
            peaks = np.abs(sketch["total"] + sketch["noise"]).max(axis=0)
            self._peaks = np.maximum(self._peaks, peaks) if self._peaks.size else peaks
            if has_releases and self._unit is None:  # the same in all steps
                raw = np.abs(self._sketch([steps[0].released], "released")).sum()
                scaled = np.abs(sketch["total"][0] + sketch["noise"][0]).sum()
                self._unit = float(scaled / raw) if raw else None
        if eps is not None:
            self._observe_precision(np.asarray(eps))

    def _observe_precision(self, eps: FloatArray) -> None:
        assert self.layout is not None
        is_single = eps.ndim == 0 and eps.dtype.kind in "iuf"
        finest = np.full(self.layout.sketch.size, eps) if is_single else self._sketch([eps], "precision")[0]
        self._eps = finest if self._eps is None else np.maximum(self._eps, finest)

    def _stacked(self, vectors: Sequence[Any], name: str, size: int | None) -> npt.NDArray[Any]:
        """Return vectors of equal lengths as rows, or raise."""
        arrays = [np.asarray(vector) for vector in vectors]
        expected = size if self.layout is None else self.layout.num_parameters
        for step, values in enumerate(arrays, self.num_steps):
            length = arrays[0].size if expected is None else expected
            if values.ndim == 1 and values.size == length > 0 and values.dtype.kind in "fiu":
                continue
            if name == "noise":
                raise InputError(
                    f"Expected the noise of step {step} as a vector of {length or 'some'} numbers, got shape "
                    f"{values.shape} of {values.dtype}."
                )
            raise InputError(
                f"Expected {name}=... of step {step} as {length} finite numbers, as many as those of the "
                f"noise, got shape {values.shape}."
            )
        return np.stack(arrays)

    def _sketch(self, vectors: Sequence[Any], name: str) -> FloatArray:
        """Return the numbers at the coordinates that are kept for every step, steps x coordinates."""
        assert self.layout is not None
        values = self._stacked(vectors, name, self.layout.num_parameters)
        chosen = values if self.layout.chosen is None else values[:, self.layout.chosen]
        rows = np.asarray(chosen[:, self.layout.sketch], dtype=np.float64)
        is_finite = np.isfinite(rows).all(axis=1)
        if not is_finite.all():
            raise InputError(
                f"Expected {name}=... of step {self.num_steps + int(np.argmin(is_finite))} as "
                f"{self.layout.num_parameters} finite numbers, as many as those of the noise, got shape "
                f"{values.shape[1:]}."
            )
        return rows

    def _require_same_leaves(self, leaves: Leaves | None) -> None:
        assert self.layout is not None
        if leaves is None or leaves is self._leaves:
            return
        if self.num_steps and not self.layout.is_like(leaves):
            raise InputError(f"Expected the same leaves in step {self.num_steps} as in the first step.")
        self._leaves = leaves

    def _require_finite(self, noise: FloatArray, squares: FloatArray) -> None:
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(squares.sum(axis=1))
        if is_finite.all():
            return
        assert self.layout is not None
        step = int(np.argmin(is_finite))
        index = int(np.argmin(np.isfinite(squares[step])))
        raise InputError(
            f"Expected finite noise in step {self.num_steps + step}, got {noise[step, index]} at "
            f"coordinate {self.layout.coordinate(index)}: did training diverge?"
        )

    def record(self, std: float = 1.0) -> NoiseRecord:
        """Return the noise in units of a claimed standard deviation of ``std`` clipping norms."""
        assert self.layout is not None
        numbers = np.array(self._numbers).reshape(self.num_steps, -1)
        numbers[:, :3] /= [std**2, std, std]
        rows, few, scale = self._ends.rows(), self._few.rows()["noise"], np.float32(1 / std)
        return NoiseRecord(
            layout=self.layout,
            num_steps=self.num_steps,
            energies=self._energies / std**2,
            step_energies=numbers[:, 0].tolist(),
            step_sums=numbers[:, 1].tolist(),
            largest=[(most, count) for most, count in numbers[:, 2:4].tolist()],
            covariates=dict(zip(COVARIATES, numbers[:, 4:].T.tolist(), strict=True)),
            rows=rows["noise"] * scale,
            steps=self._ends.steps,
            few_rows=few * scale,
            few_steps=self._few.steps,
            sums=rows["total"] * scale if "total" in rows else None,
            example_sums=rows["examples"] * scale if "examples" in rows else None,
            weights=rows.get("weights"),
            formats=self._formats,
            eps=self._eps,
            peaks=self._peaks / std,
            unit=None if self._unit is None else self._unit / std,
            given_rounding=self._rounding / std,
            rounding=self._unexplained_rounding / std,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        if self.layout is None:
            return {}
        arrays = {"numbers": np.array(self._numbers), "energies": self._energies, "peaks": self._peaks}
        return {
            "num_parameters": self.layout.num_parameters,
            "leaves": dict(self.layout.leaves),
            **{name: values.copy() for name, values in arrays.items()},
            "eps": deepcopy(self._eps),
            "unit": self._unit,
            "roundings": (self._rounding, self._unexplained_rounding),
            "ends": self._ends.state_dict(),
            "few": self._few.state_dict(),
            "formats": self._formats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        self.__init__()  # type: ignore[misc]  # forget all steps
        if not state:
            return
        self.layout = Layout.of(state["num_parameters"], state["leaves"])
        self._numbers = array("d", np.asarray(state["numbers"], dtype=np.float64).tolist())
        self._energies, self._peaks = np.array(state["energies"]), np.array(state["peaks"])
        self._eps, self._unit = deepcopy(state["eps"]), state["unit"]
        self._rounding, self._unexplained_rounding = state["roundings"]
        self._ends.load_state_dict(state["ends"])
        self._few.load_state_dict(state["few"])
        self._formats.load_state_dict(state["formats"])


@dataclass(eq=False, kw_only=True)
class NoiseRecord:
    """The noise of a run in claimed standard deviations. It does not change; what tests share is cached."""

    layout: Layout
    num_steps: int
    energies: FloatArray
    """The sum of squares of each coordinate."""
    step_energies: list[float]
    """The sum of squares of each step."""
    step_sums: list[float]
    """The sum of the noise of each step."""
    largest: list[tuple[float, float]]
    """The largest absolute noise of each step, and of how many coordinates."""
    covariates: dict[str, list[float]]
    """Numbers that describe each step; NaN where one is unknown."""
    rows: npt.NDArray[np.float32]
    """The noise of the first and last steps at the coordinates of a sketch: steps x coordinates."""
    steps: IntArray
    """The step number of each of :attr:`rows`."""
    few_rows: npt.NDArray[np.float32]
    """The noise of the first and last 2,048 steps at a few of these coordinates."""
    few_steps: IntArray
    """The step number of each of :attr:`few_rows`."""
    sums: npt.NDArray[np.float32] | None
    """The sums before the noise of the same steps and coordinates; None if unknown."""
    example_sums: npt.NDArray[np.float32] | None
    """The part of these sums that examples contribute; None if unknown."""
    weights: npt.NDArray[np.float32] | None
    """The weights of the model before these steps; None if unknown."""
    formats: FormatCheck
    eps: FloatArray | None
    """The relative precision of the sums at each coordinate, where it was given."""
    peaks: FloatArray
    """The largest release at each coordinate; empty if unknown."""
    unit: float | None
    """What 1 in a release is in claimed standard deviations."""
    given_rounding: float
    rounding: float
    """The largest rounding error that was given without the precision of the release."""
    _cache: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of noise values in :attr:`energy`."""
        return self.num_steps * self.energies.size

    @property
    def energy(self) -> float:
        """The sum of all squares."""
        return float(sum(self.step_energies))

    @property
    def num_signed(self) -> int:
        """The number of steps whose signs are known."""
        return len(self.rows)

    def once(self, name: str, compute: Callable[[], _Array]) -> _Array:
        """Return what ``compute`` returns, which is called once per name; tests must not change it."""
        if name not in self._cache:
            self._cache[name] = compute()
        cached: _Array = self._cache[name]
        return cached

    def with_rows(
        self, rows: npt.NDArray[np.float32], *, grid: float | None = None, **others: Any
    ) -> NoiseRecord:
        """Return the record with other rows of the same steps, and other fields; ``grid`` may stay."""
        cache = {} if grid is None else {"grid": grid}
        return replace(self, rows=rows, _cache=cache, **others)

    @property
    def signs(self) -> npt.NDArray[np.float32]:
        """The signs of :attr:`rows`; 0 where rounding may have flipped a sign."""
        return self.once("signs", lambda: sure_signs(self.rows, self.resolution))

    @property
    def sum_energy(self) -> float:
        """The squared sum of signs of each leaf in each step, over the leaf's size, summed."""
        sizes = np.asarray(self.layout.sketch_sizes)
        sizes = sizes[sizes > 0]
        starts, signs = np.cumsum(sizes) - sizes, self.signs.astype(np.float64)
        unsure = sizes - np.add.reduceat(np.abs(signs), starts, axis=1)
        sums = np.maximum(np.abs(np.add.reduceat(signs, starts, axis=1)) - unsure, 0.0)
        return float((sums**2 / sizes).sum())

    @property
    def agreeing(self) -> FloatArray:
        """For each pair of leaves, how many signs of their leading coordinates agree."""
        return self._sign_pairs[0]

    @property
    def differing(self) -> FloatArray:
        """For each pair of leaves, how many differ; the remaining numbers are too small to have a sign."""
        return self._sign_pairs[1]

    @property
    def _sign_pairs(self) -> tuple[FloatArray, FloatArray]:
        return self.once("sign pairs", self._count_sign_pairs)

    def _count_sign_pairs(self) -> tuple[FloatArray, FloatArray]:
        """Count signs of the leading coordinates that agree and differ, for each pair of leaves."""
        count = self.layout.compared.size
        ended = np.pad(self.signs, ((0, 0), (0, 1)))  # a last column of zeros, beyond the end of a leaf
        values = ended[:, self.layout.heads].transpose(1, 0, 2).reshape(count, -1)  # counts are exact
        sizes = np.abs(values)
        sure, product = (sizes @ sizes.T).astype(np.float64), (values @ values.T).astype(np.float64)
        return (sure + product) / 2, (sure - product) / 2

    @property
    def resolution(self) -> float:
        """The largest rounding error of a number, at least :data:`RESOLUTION`."""
        return max(RESOLUTION, self.given_rounding, self._release_rounding, GRID_ERROR * self.grid)

    @property
    def _release_rounding(self) -> float:
        """The largest rounding error of a release in a format of 16 bits; 0 in any other format."""
        if self.peaks.size == 0:
            return 0.0
        is_coarse = self.release_precision >= FLOAT16
        return float((self.release_precision * self.peaks)[is_coarse].max(initial=0.0)) / 2

    @property
    def grid(self) -> float:
        """The spacing of the grid on which all releases are, in claimed standard deviations; 0 if none."""
        if self.unit is None or self.sums is None or self.formats.is_empty:
            return 0.0
        unit = self.unit
        return self.once("grid", lambda: self.formats.grid(self.rows, unit))

    @property
    def release_precision(self) -> FloatArray:
        """The relative precision of the release at each coordinate of a sketch: single unless known."""
        return self.once("precision", self._find_precision)

    def _find_precision(self) -> FloatArray:
        if self.formats.is_empty:
            return np.full(self.layout.sketch.size, SINGLE) if self.eps is None else self.eps
        recognized = self.formats.precision(self.layout.sketch_sizes)
        return recognized if self.eps is None else np.maximum(recognized, self.eps)


def _numbers(step: ObservedStep) -> tuple[tuple[float, float] | None, list[float]]:
    """Return the largest noise of a step, and of how many coordinates, and the covariates of the step."""
    largest = step.max_noise
    if largest is not None:
        if not isinstance(largest, tuple | list) or len(largest) != 2:
            raise InputError(
                f"Expected largest={quoted(largest)} to be a number and how many it is the largest of."
            )
        largest = NoiseMaximum(*(_number("largest", value) for value in largest))
    return largest, [_number(name, getattr(step, source)) for name, source in COVARIATES.items()]


def _number(name: str, value: float | None) -> float:
    """Return what describes a step as a number; NaN if it is not known."""
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"Expected {name}={quoted(value)} to be a number.") from error

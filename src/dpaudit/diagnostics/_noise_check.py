"""The check of the noise of all steps: :class:`NoiseLog` collects them, and the tests read its record.

Steps are in clipping norms, because the claim may not be known yet, and take bounded memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.diagnostics._distribution_tests import is_coarse
from dpaudit.diagnostics._noise_record import FEW_COORDINATES, FormatCheck, Layout, NoiseRecord
from dpaudit.diagnostics._noise_tests import (
    discount_weight_decay,
    drift_note,
    noise_amount,
    noise_checks,
    with_cause_of_correlation,
)
from dpaudit.diagnostics._p_values import RESOLUTION, Amount, CheckResults, EndRows
from dpaudit.diagnostics._step import ClaimedStep, Leaves, NoiseMaximum, ObservedStep, missing_fields
from dpaudit.errors import InputError, quoted

COVARIATES = {
    "batch_size": "num_rows",
    "sum_norm": "sum_norm",
    "longest": "max_row_norm",
    "num_canaries": "num_canaries",
    "noise_multiplier": "noise_multiplier",
}
"""Numbers of a step on which its noise must not depend, except for the noise multiplier that it states."""
_VECTORS = {"total": "known", "examples": "examples", "weights": "weights"}  # and names of keywords
_NEEDED = ("total", "sum_norm", "num_rows", "max_row_norm")  # by tests of what the noise depends on


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
                    f"The noise of step {step} must be a vector of {length or 'some'} numbers, got shape "
                    f"{values.shape} of {values.dtype}."
                )
            raise InputError(
                f"{name} of step {step} must be {length} finite numbers, as many as those of the noise, got "
                f"shape {values.shape}."
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
                f"{name} of step {self.num_steps + int(np.argmin(is_finite))} must be "
                f"{self.layout.num_parameters} finite numbers, as many as those of the noise, got shape "
                f"{values.shape[1:]}."
            )
        return rows

    def _require_same_leaves(self, leaves: Leaves | None) -> None:
        assert self.layout is not None
        if leaves is None or leaves is self._leaves:
            return
        if self.num_steps and not self.layout.is_like(leaves):
            raise InputError(f"Step {self.num_steps} must have the same leaves as the first step.")
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
            f"Noise must be finite, got {noise[step, index]} at coordinate {self.layout.coordinate(index)} "
            f"in step {self.num_steps + step}. Did training diverge?"
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


def _numbers(step: ObservedStep) -> tuple[tuple[float, float] | None, list[float]]:
    """Return the largest noise of a step, and of how many coordinates, and the covariates of the step."""
    largest = step.max_noise
    if largest is not None:
        if not isinstance(largest, tuple | list) or len(largest) != 2:
            raise InputError(
                f"largest must be a number and how many it is the largest of, got {quoted(largest)}."
            )
        largest = NoiseMaximum(*(_number("largest", value) for value in largest))
    return largest, [_number(name, getattr(step, source)) for name, source in COVARIATES.items()]


def _number(name: str, value: float | None) -> float:
    """Return what describes a step as a number; NaN if it is not known."""
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} must be a number, got {quoted(value)}.") from error


class NoiseCheck:
    """All tests of the noise; steps without noise are not tested.

    A canary that is not clipped as claimed leaves a trace in the noise. Where an observer gives
    ``noise_apart`` as well, that is tested instead if canaries do not score as expected.
    """

    tests_noise = True

    def __init__(self, *, names_missing_fields: bool = True) -> None:
        self._names_missing_fields = names_missing_fields
        self._log, self._apart = NoiseLog(), NoiseLog()
        self._pending: list[ObservedStep] = []
        self._given: set[str] = set()

    @property
    def num_steps(self) -> int:
        """The number of steps whose noise was observed."""
        return self._log.num_steps + len(self._pending)

    def observe(self, step: ObservedStep) -> None:
        """Add the next step, if its noise is known."""
        if step.noise is None:
            return
        self._pending.append(step)
        chunk_steps = 64  # steps that are processed together
        if len(self._pending) == chunk_steps or self._log.num_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Process the steps that are only noted so far.

        Many at once take less time: after a step of training, caches are empty.
        """
        steps, self._pending = self._pending, []
        if not steps:
            return
        self._log.observe(steps)
        if steps[0].noise_apart is not None:
            self._apart.observe(steps, "noise_apart")
        self._given |= set(steps[-1].given)

    def record(self, noise_multiplier: float = 1.0) -> NoiseRecord:
        """Return the noise in units of this noise multiplier."""
        self.flush()
        return self._log.record(noise_multiplier)

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Test the noise against the claimed noise multiplier."""
        self.flush()
        if self.num_steps == 0:
            return CheckResults()
        log = self._log if self._apart.num_steps == 0 or claimed.has_signal() else self._apart
        results = noise_results(log.record(claimed.noise_multiplier), claimed.confidence)
        missing = missing_fields(self._given, _NEEDED) if self._names_missing_fields else ()
        return replace(results, not_covered=(*results.not_covered, *missing))

    @property
    def given_fields(self) -> frozenset[str]:
        """The fields of the observed steps that were not left out."""
        self.flush()
        return frozenset(self._given)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        self.flush()
        states = {"noise": self._log.state_dict(), "apart": self._apart.state_dict()}
        return {**states, "given": sorted(self._given)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        self._pending.clear()
        with _validate.state_dict_errors("the noise of steps", state):
            self._given = set(state["given"])
            for log, name in ((self._log, "noise"), (self._apart, "apart")):
                log.load_state_dict(state[name])
                if log.num_steps:
                    _ = log.record().resolution, log.record().sum_energy  # raises if sizes do not fit


def noise_results(record: NoiseRecord, confidence: float) -> CheckResults:
    """Run all tests of the noise in claimed standard deviations."""
    checks, notes = discount_weight_decay(record, noise_checks(record, confidence))
    amount = noise_amount(record, confidence)
    return CheckResults(
        checks=tuple(with_cause_of_correlation(record, checks)),
        notes=(*_notes(record, amount), *notes),
        not_covered=_gaps(record),
        noise=amount,
    )


def _notes(record: NoiseRecord, amount: Amount) -> list[str]:
    notes, drift = [], drift_note(record)
    if amount.low > 1 + RESOLUTION:
        notes.append(f"The noise is {amount}: noise above the claim costs accuracy, not privacy.")
    return notes if drift is None else [*notes, drift]


def _gaps(record: NoiseRecord) -> tuple[str, ...]:
    coarse, stated = is_coarse(record), np.asarray(record.covariates["noise_multiplier"])
    gaps = []
    if np.ptp(stated) > 0:  # NaN if a step states none
        gaps.append("the noise multiplier changed during the run: dependence on the data was not tested")
    if coarse.any():
        where = "" if coarse.all() else f" at {100 * coarse.mean():.0f} % of the coordinates"
        gaps.append(
            f"The release is in low precision{where}, which hides whether the noise was drawn on a lattice "
            "or from a table: ties are not tested there."
        )
    return tuple(gaps)

"""Statistics of the noise of all steps that the noise tests need, in bounded memory.

``NoiseRecord`` holds them, at the coordinates of a ``Layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._coordinate_layout import Layout, Leaves
from dpaudit.diagnostics._number_formats import GRID_ERROR, SINGLE, FormatCheck
from dpaudit.diagnostics._p_values import END, RESOLUTION, HeadTailBuffer, sure_signs, sure_single_signs
from dpaudit.errors import InputError, quoted

_Array = TypeVar("_Array")
COVARIATES = ("batch_size", "sum_norm", "longest", "num_canaries", "noise_multiplier")
"""Numbers of a step on which its noise must not depend, except for the noise multiplier that it states."""
FEW_COORDINATES = 128
"""Coordinates that are kept for more steps, because equal noise needs few of them to be recognized."""
# attributes of a record that its state holds unchanged
_SUMS = ("energies", "step_energies", "sum_energy", "agreeing", "differing")
_DESCRIPTIONS = ("precision", "rounding", "largest", "covariates")


class NoiseRecord:
    """Summary of the noise of a training run: sums over all steps, and a few coordinates of every step.

    It needs no more memory than a few gradients.
    """

    def __init__(self) -> None:
        self.layout: Layout
        self.energies: FloatArray
        """The sum of squares of each coordinate."""
        self.step_energies: list[float] = []
        """The sum of squares of each step."""
        self.step_sums: list[float] = []
        """The sum of the noise of each step."""
        self.sum_energy = 0.0
        """The squared sum of signs of each leaf in each step, over the leaf's size, summed."""
        self.agreeing: FloatArray
        """For each pair of leaves, how many signs of their leading coordinates agree."""
        self.differing: FloatArray
        """For each pair of leaves, how many differ; the remaining numbers are too small to have a sign."""
        self.num_signed = 0
        """The number of steps whose signs are in these sums: those whose noise was given."""
        self._resolution = RESOLUTION  # the largest rounding error that was given
        self._sizes = np.zeros(2)  # of one release as given, and in claimed standard deviations
        self.sketches = HeadTailBuffer(END)
        self.few = HeadTailBuffer()
        """The noise of more steps at the first coordinates of a sketch."""
        self.sums = HeadTailBuffer(END)
        """The known sums of the same steps and coordinates, if all were given."""
        self.examples = HeadTailBuffer(END)
        """The same without canaries."""
        self.weight_rows = HeadTailBuffer(END)
        """The weights before the same steps at the same coordinates, if all were given."""
        self.formats = FormatCheck()
        self.precision: FloatArray | None = None
        """The relative precision of the release at each coordinate of a sketch, where it was given."""
        self.rounding = 0.0
        """The largest rounding error that was given without the precision of the release."""
        self.largest: list[tuple[float, float]] = []
        """The largest absolute noise of each step, and of how many coordinates."""
        self.covariates: dict[str, list[float]] = {name: [] for name in COVARIATES}
        self._leaves: Leaves | None = None  # of the latest step
        self._shared: dict[str, Any] | None = None  # arrays that several tests need, during the tests

    @property
    def num_steps(self) -> int:
        """The number of observed steps."""
        return len(self.step_energies)

    @property
    def count(self) -> int:
        """The number of noise values in ``energy``."""
        return self.num_steps * self.energies.size

    @property
    def energy(self) -> float:
        """The sum of all squares."""
        return float(sum(self.step_energies))

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Compute each array that several tests need once for all tests inside the block."""
        self._shared = {}
        try:
            yield
        finally:
            self._shared = None

    def once(self, name: str, compute: Callable[[], _Array]) -> _Array:
        """Return what ``compute`` returns; inside :meth:`sharing` it is called once per name.

        Tests must not change what they get.
        """
        if self._shared is None:
            return compute()
        if name not in self._shared:
            self._shared[name] = compute()
        found: _Array = self._shared[name]
        return found

    def share(self, **values: Any) -> None:
        """Use these values wherever ``once`` is called with their names, and forget all others."""
        self._shared = values

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        """The noise of the first and last steps at the coordinates of a sketch: steps x coordinates."""
        return self.once("rows", lambda: self.sketches.rows)

    @property
    def few_rows(self) -> npt.NDArray[np.float32]:
        """The noise of the first and last 2,048 steps at a few of these coordinates."""
        return self.once("few_rows", lambda: self.few.rows)

    @property
    def few_steps(self) -> IntArray:
        """The step number of each of :attr:`few_rows`."""
        return self.once("few_steps", lambda: self.few.steps)

    @property
    def steps(self) -> IntArray:
        """The step number of each of :attr:`rows`."""
        return self.sketches.steps

    @property
    def signs(self) -> npt.NDArray[np.float32]:
        """The signs of :attr:`rows`; 0 where rounding may have flipped a sign."""
        return self.once("signs", lambda: sure_single_signs(self.rows, self.resolution))

    @property
    def known(self) -> npt.NDArray[np.float32] | None:
        """The known sums of the steps of the sketches, in claimed standard deviations; None if unknown."""
        return self.once("known", lambda: self._complete(self.sums))

    @property
    def known_examples(self) -> npt.NDArray[np.float32] | None:
        """The part of the known sums that examples contribute; None if unknown."""
        return self.once("examples", lambda: self._complete(self.examples))

    @property
    def weights(self) -> npt.NDArray[np.float32] | None:
        """The weights of the model before the steps of :attr:`rows`; None if unknown."""
        return self.weight_rows.rows if self.weight_rows.num_seen == self.num_steps > 0 else None

    @property
    def resolution(self) -> float:
        """The largest rounding error of a number."""
        return max(self._resolution, GRID_ERROR * self.grid)

    @property
    def grid(self) -> float:
        """The spacing of the grid on which all releases are, in claimed standard deviations; 0 if none."""
        given, scaled = self._sizes
        if given == 0 or self.known is None:
            return 0.0
        return self.once("grid", lambda: self.formats.grid(self.rows, scaled / given))

    def _complete(self, rows: HeadTailBuffer) -> npt.NDArray[np.float32] | None:
        return rows.rows if self.num_steps and rows.num_seen == self.num_steps else None

    @property
    def release_precision(self) -> FloatArray:
        """The relative precision of the release at each coordinate of a sketch: single unless known."""
        width = self.layout.sketch.size
        if self.formats.is_empty:
            return np.full(width, SINGLE) if self.precision is None else self.precision
        found = self.formats.precision(self.layout.sketch_sizes)
        return found if self.precision is None else np.maximum(found, self.precision)

    def observe(
        self,
        residual: Any,
        leaves: Leaves | None = None,
        rounding: float = 0.0,
        *,
        known: Any = None,
        examples: Any = None,
        released: Any = None,
        weights: Any = None,
        precision: Any = None,
        largest: tuple[float, float] | None = None,
        covariates: Mapping[str, float | None] | None = None,
    ) -> None:
        """Add the noise of one step and its rounding error, in claimed standard deviations.

        The other arguments are as in ``Diagnostics.observe_noise``.
        """
        parts = {"known": known, "examples": examples, "released": released, "weights": weights}
        self.observe_steps(
            np.asarray(residual)[None],
            leaves,
            rounding,
            parts={name: np.asarray(part)[None] for name, part in parts.items() if part is not None},
            precision=precision,
            largest=None if largest is None else [largest],
            covariates=[covariates or {}],
        )

    def observe_steps(
        self,
        residuals: Any,
        leaves: Leaves | None = None,
        rounding: float = 0.0,
        *,
        parts: Mapping[str, Any],
        precision: Any = None,
        largest: Sequence[tuple[float, float]] | None = None,
        covariates: Sequence[Mapping[str, float | None]],
    ) -> None:
        """Add the noise of consecutive steps, steps x coordinates; ``parts`` has sums, releases and weights.

        The result is the same as for one step at a time, in a fraction of the time.
        """
        vectors = np.asarray(residuals)
        self._require_consistent(vectors, leaves)
        if len(covariates) != len(vectors) or (largest is not None and len(largest) != len(vectors)):
            raise InputError(
                f"Expected largest and described with one entry for each of {len(vectors)} steps."
            )
        described = {name: [_number(name, step.get(name)) for step in covariates] for name in self.covariates}
        tops = None if largest is None else [_pair(one) for one in largest]
        if self.num_steps == 0:
            self._start(Layout.of(vectors.shape[1], leaves))
        layout = self.layout
        kept = {name: self._sketch(part, vectors, name) for name, part in parts.items()}
        # row by row, so that sums do not depend on how steps are grouped
        kept_vectors = vectors if layout.kept is None else vectors[:, layout.kept]
        noise = np.ascontiguousarray(kept_vectors, dtype=np.float64)
        with np.errstate(over="ignore"):  # which the next lines report
            squares = noise * noise
            energies = squares.sum(axis=1)
        self._require_finite(noise, squares, energies)
        sketch = noise[:, layout.sketch]
        fine = None if precision is None else self._precision(precision, vectors[0])
        self._add_format(kept, sketch, rounding, fine)
        self._resolution = max(self._resolution, rounding)
        for own in squares:  # one after another: the sum does not depend on how steps are grouped
            self.energies += own
        self.step_energies += energies.tolist()
        self.step_sums += noise.sum(axis=1).tolist()
        signs = sure_signs(noise, max(RESOLUTION, rounding))
        self.num_signed += len(vectors)
        self._add_sums(signs)
        self._add_pairs(signs)
        for buffer, rows in (
            (self.sketches, sketch),
            (self.few, sketch[:, :FEW_COORDINATES]),
            (self.sums, kept.get("known", ())),
            (self.examples, kept.get("examples", ())),
            (self.weight_rows, kept.get("weights", ())),
        ):
            for row in np.asarray(rows, dtype=np.float32):
                buffer.add(row)
        self.largest += tops or [
            (float(root), float(noise.shape[1])) for root in np.sqrt(squares.max(axis=1))
        ]
        for name, values in described.items():
            self.covariates[name].extend(values)

    def observe_amounts(
        self,
        energies: FloatArray,
        few: ScoreArray,
        *,
        step_energies: Sequence[float],
        step_sums: Sequence[float],
        largest: Sequence[tuple[float, float]],
        covariates: Mapping[str, Sequence[float]],
    ) -> None:
        """Add consecutive steps after the first 512 whose noise was not kept, in claimed standard deviations.

        ``energies`` are the sums of squares of each coordinate over these steps. ``few`` has the noise of as
        many of the first as of the last of them, at the first :data:`FEW_COORDINATES`. Signs are not known.
        """
        count = len(step_energies)
        self.energies += energies
        self.step_energies += step_energies
        self.step_sums += step_sums
        self.largest += largest
        for number, row in enumerate(few):
            if number == len(few) // 2:
                self.few.skip(count - len(few))
            self.few.add(row)
        for buffer in (self.sketches, self.sums, self.examples, self.weight_rows):
            buffer.skip(count)
        for name, values in self.covariates.items():
            values.extend(covariates[name])

    def _add_format(
        self,
        kept: Mapping[str, FloatArray],
        sketch: FloatArray,
        rounding: float,
        precision: FloatArray | None,
    ) -> None:
        """Add what the releases, or else the arguments, show of the precision of the releases."""
        released, known = kept.get("released"), kept.get("known")
        if released is not None:
            self.formats.observe_steps(released)
            if known is not None and not self._sizes[0]:  # the same in all steps
                self._sizes += np.abs(released[0]).sum(), np.abs(known[0] + sketch[0]).sum()
        elif precision is None:
            self.rounding = max(self.rounding, rounding)
        if precision is not None:
            before = self.precision
            self.precision = precision.copy() if before is None else np.maximum(before, precision)

    def _precision(self, given: Any, vector: Any) -> FloatArray:
        """Return the relative precision of each kept coordinate; one number is that of all."""
        numbers = np.asarray(given)
        all_given = np.broadcast_to(numbers, vector.shape) if numbers.ndim == 0 else numbers
        found: FloatArray = self._sketch(all_given[None], vector[None], "precision")[0]
        return found

    def _sketch(self, given: Any, vectors: Any, name: str) -> FloatArray:
        """Return the numbers at the coordinates that are kept for every step."""
        values, step = np.asarray(given), 0
        if values.shape == vectors.shape and values.dtype.kind in "iufb":
            kept = values if self.layout.kept is None else values[:, self.layout.kept]
            found = np.asarray(kept[:, self.layout.sketch], dtype=np.float64)
            is_finite = np.isfinite(found).all(axis=1)
            if is_finite.all():
                return found
            step = int(np.argmin(is_finite))
        raise InputError(
            f"Expected {name}=... of step {self.num_steps + step} as {vectors.shape[1]} finite numbers, as "
            f"many as those of the noise, got shape {values.shape[1:]}."
        )

    def _require_consistent(self, vectors: Any, leaves: Leaves | None) -> None:
        size = vectors[:1].size
        expected = self.layout.num_parameters if self.num_steps else size
        if vectors.ndim != 2 or size != expected or size == 0 or vectors.dtype.kind not in "fiu":
            raise InputError(
                f"Expected the noise of step {self.num_steps} as a vector of {expected or 'some'} numbers, "
                f"got shape {vectors.shape[1:]} of {vectors.dtype}."
            )
        if self.num_steps and leaves is not self._leaves and leaves is not None:
            if not self.layout.is_like(leaves):
                raise InputError(f"Expected the same leaves in step {self.num_steps} as in the first step.")
            self._leaves = leaves

    def _require_finite(self, noise: FloatArray, squares: FloatArray, energies: FloatArray) -> None:
        if np.isfinite(energies).all():
            return
        step = int(np.argmin(np.isfinite(energies)))
        index = int(np.argmin(np.isfinite(squares[step])))
        raise InputError(
            f"Expected finite noise in step {self.num_steps + step}, got {noise[step, index]} at "
            f"coordinate {self.layout.coordinate(index)}: did training diverge?"
        )

    def _start(self, layout: Layout) -> None:
        self.layout = layout
        self.energies = np.zeros(int(layout.sizes.sum()))
        self.agreeing = np.zeros((layout.compared.size, layout.compared.size))
        self.differing = self.agreeing.copy()

    def _add_sums(self, signs: FloatArray) -> None:
        starts, sizes = self.layout.starts, self.layout.sizes
        unsure = sizes - np.add.reduceat(np.abs(signs), starts, axis=1)
        sums = np.maximum(np.abs(np.add.reduceat(signs, starts, axis=1)) - unsure, 0.0)
        for energy in (sums**2 / sizes).sum(axis=1).tolist():
            self.sum_energy += energy

    def _add_pairs(self, signs: FloatArray) -> None:
        count = self.layout.compared.size
        if count > 1:
            ended = np.pad(signs.astype(np.float32), ((0, 0), (0, 1)))  # counts are exact
            values = ended[:, self.layout.heads].transpose(1, 0, 2).reshape(count, -1)
            sizes = np.abs(values)
            sure, product = sizes @ sizes.T, values @ values.T
            self.agreeing += (sure + product) / 2
            self.differing += (sure - product) / 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        if self.num_steps == 0:
            return {}
        return {
            "num_parameters": self.layout.num_parameters,
            "leaves": dict(self.layout.leaves),
            **{name: copy(getattr(self, name)) for name in _SUMS},
            **{name: deepcopy(getattr(self, name)) for name in _DESCRIPTIONS},
            "resolution": self._resolution,
            "sizes": self._sizes.copy(),
            "step_sums": list(self.step_sums),
            "num_signed": self.num_signed,
            "sketches": self.sketches.state_dict(),
            "few": self.few.state_dict(),
            "sums": self.sums.state_dict(),
            "examples": self.examples.state_dict(),
            "weights": self.weight_rows.state_dict(),
            "formats": self.formats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        if not state:
            return
        self._start(Layout.of(state["num_parameters"], state["leaves"]))
        for name in _SUMS:
            setattr(self, name, copy(state[name]))
        self._resolution, self._sizes = state["resolution"], np.array(state["sizes"])
        self.step_sums = list(state["step_sums"])
        self.num_signed = state["num_signed"]
        self.sketches.load_state_dict(state["sketches"])
        self.few.load_state_dict(state["few"], FEW_COORDINATES)
        self.sums.load_state_dict(state["sums"])
        self.formats.load_state_dict(state["formats"])
        self.examples.load_state_dict(state["examples"])
        self.weight_rows.load_state_dict(state["weights"])
        for name in _DESCRIPTIONS:
            setattr(self, name, deepcopy(state[name]))


def _pair(given: Any) -> tuple[float, float]:
    """Return the largest noise of a step, and of how many coordinates it is the largest."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(
            f"Expected largest={quoted(given)} to be a number and how many it is the largest of."
        )
    return _number("largest", given[0]), _number("largest", given[1])


def _number(name: str, value: float | None) -> float:
    """Return what describes a step as a number; NaN if it is not known."""
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"Expected {name}={quoted(value)} to be a number.") from error

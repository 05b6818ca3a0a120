"""Statistics of the noise of all steps that the noise tests need, in bounded memory.

``NoiseRecord`` holds them; its ``Layout`` defines which coordinates of a gradient are kept, and to which leaf
(parameter) each belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics._number_formats import GRID_ERROR, SINGLE, FormatCheck
from dpaudit.diagnostics._p_values import RESOLUTION, HeadTailBuffer, fixed_rng, sure_signs, sure_single_signs
from dpaudit.errors import InputError, quoted

Leaves = Mapping[str, int] | Sequence[int]
"""The sizes of the parameters that a gradient consists of, in order, with their names if they have any."""

_MAX_COORDINATES = 2**20  # coordinates kept for a large model
_PREFIX = 256  # leading coordinates of each leaf that are compared with those of other leaves
_MAX_COMPARED = 64  # leaves that are compared with each other
_SKETCH = 1024  # coordinates that are kept for every step
_OLD_SKETCH = 512  # in version 0.1, whose states may be loaded
_Array = TypeVar("_Array")
COVARIATES = ("batch_size", "sum_norm", "longest", "num_canaries")
"""Numbers of a step on which its noise must not depend."""
# attributes of a record that its state holds unchanged
_SUMS = ("energies", "step_energies", "sum_energy", "agreeing", "differing")
_LATER = ("precision", "rounding", "largest", "covariates")  # since version 0.2


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
        """The sum of the noise of each step; not a number if it was not kept."""
        self.sum_energy = 0.0
        """The squared sum of signs of each leaf in each step, over the leaf's size, summed."""
        self.agreeing: FloatArray
        """For each pair of leaves, how many signs of their leading coordinates agree."""
        self.differing: FloatArray
        """For each pair of leaves, how many differ; the remaining numbers are too small to have a sign."""
        self._resolution = RESOLUTION  # the largest rounding error that was given
        self._sizes = np.zeros(2)  # of one release as given, and in claimed standard deviations
        self.sketches = HeadTailBuffer()
        self.sums = HeadTailBuffer()
        """The known sums of the same steps and coordinates, if all were given."""
        self.examples = HeadTailBuffer()
        """The same without canaries."""
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

    def share(self, name: str, value: Any) -> None:
        """Use this value wherever ``once`` is called with the name, and forget all others."""
        self._shared = {name: value}

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        """The noise of all kept steps at the coordinates of a sketch: steps x coordinates."""
        return self.once("rows", lambda: self.sketches.rows)

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
        precision: Any = None,
        largest: tuple[float, float] | None = None,
        covariates: Mapping[str, float | None] | None = None,
    ) -> None:
        """Add the noise of one step and its rounding error, in claimed standard deviations.

        The other arguments are as in ``Diagnostics.observe_noise``.
        """
        vector = np.asarray(residual)
        self._require_consistent(vector, leaves)
        described = {name: _number(name, (covariates or {}).get(name)) for name in self.covariates}
        if self.num_steps == 0:
            self._start(Layout.of(vector.size, leaves))
        layout = self.layout
        sums = None if known is None else self._sketch(known, vector, "known")
        own = None if examples is None else self._sketch(examples, vector, "examples")
        raw = None if released is None else self._sketch(released, vector, "released")
        fine = None if precision is None else self._precision(precision, vector)
        noise = np.asarray(vector if layout.kept is None else vector[layout.kept], dtype=np.float64)
        with np.errstate(over="ignore"):  # which the next lines report
            squares = noise * noise
            energy = float(squares.sum())
        if not np.isfinite(energy):
            index = int(np.argmax(~np.isfinite(squares)))
            raise InputError(
                f"Expected finite noise in step {self.num_steps}, got {noise[index]} at coordinate "
                f"{layout.coordinate(index)}: did training diverge?"
            )
        self._resolution = max(self._resolution, rounding)
        self.energies += squares
        self.step_energies.append(energy)
        self.step_sums.append(float(noise.sum()))
        signs = sure_signs(noise, max(RESOLUTION, rounding))
        self._add_sums(signs)
        self._add_pairs(signs)
        self.sketches.add(noise[layout.sketch].astype(np.float32))
        if sums is not None:
            self.sums.add(sums.astype(np.float32))
        if own is not None:
            self.examples.add(own.astype(np.float32))
        if raw is not None:
            self.formats.observe(raw)
            if sums is not None and not self._sizes[0]:  # the same in all steps
                self._sizes += np.abs(raw).sum(), np.abs(sums + noise[layout.sketch]).sum()
        elif fine is None:
            self.rounding = max(self.rounding, rounding)
        if fine is not None:
            self.precision = fine.copy() if self.precision is None else np.maximum(self.precision, fine)
        self.largest.append(largest or (float(np.sqrt(squares.max())), float(noise.size)))
        for name, values in self.covariates.items():
            values.append(described[name])

    def _precision(self, given: Any, vector: Any) -> FloatArray:
        """Return the relative precision of each kept coordinate; one number is that of all."""
        numbers = np.asarray(given)
        all_given = np.broadcast_to(numbers, vector.shape) if numbers.ndim == 0 else numbers
        return self._sketch(all_given, vector, "precision")

    def _sketch(self, given: Any, vector: Any, name: str) -> FloatArray:
        """Return the numbers at the coordinates that are kept for every step."""
        values = np.asarray(given)
        if values.shape == vector.shape and values.dtype.kind in "iufb":
            kept = values if self.layout.kept is None else values[self.layout.kept]
            found = np.asarray(kept[self.layout.sketch], dtype=np.float64)
            if np.isfinite(found).all():
                return found
        raise InputError(
            f"Expected {name}=... of step {self.num_steps} as {vector.size} finite numbers, as many as those "
            f"of the noise, got shape {values.shape}."
        )

    def _require_consistent(self, vector: Any, leaves: Leaves | None) -> None:
        expected = self.layout.num_parameters if self.num_steps else vector.size
        if vector.ndim != 1 or vector.size != expected or vector.size == 0 or vector.dtype.kind not in "fiu":
            raise InputError(
                f"Expected the noise of step {self.num_steps} as a vector of {expected or 'some'} numbers, "
                f"got shape {vector.shape} of {vector.dtype}."
            )
        if self.num_steps and leaves is not self._leaves and leaves is not None:
            if not self.layout.is_like(leaves):
                raise InputError(f"Expected the same leaves in step {self.num_steps} as in the first step.")
            self._leaves = leaves

    def _start(self, layout: Layout) -> None:
        self.layout = layout
        self.energies = np.zeros(int(layout.sizes.sum()))
        self.agreeing = np.zeros((layout.compared.size, layout.compared.size))
        self.differing = self.agreeing.copy()

    def _add_sums(self, signs: FloatArray) -> None:
        starts, sizes = self.layout.starts, self.layout.sizes
        unsure = sizes - np.add.reduceat(np.abs(signs), starts)
        sums = np.maximum(np.abs(np.add.reduceat(signs, starts)) - unsure, 0.0)
        self.sum_energy += float((sums**2 / sizes).sum())

    def _add_pairs(self, signs: FloatArray) -> None:
        if self.layout.compared.size > 1:
            values = np.append(signs, 0.0)[self.layout.heads].astype(np.float32)  # counts are exact
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
            **{name: deepcopy(getattr(self, name)) for name in _LATER},
            "resolution": self._resolution,
            "sizes": self._sizes.copy(),
            "step_sums": list(self.step_sums),
            "sketches": self.sketches.state_dict(),
            "sums": self.sums.state_dict(),
            "examples": self.examples.state_dict(),
            "formats": self.formats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        if not state:
            return
        buffered = state["sketches"]["head"]
        width = buffered.shape[1] if len(buffered) else _SKETCH
        self._start(Layout.of(state["num_parameters"], state["leaves"], width))
        for name in _SUMS:
            setattr(self, name, copy(state[name]))
        self._resolution, self._sizes = state["resolution"], np.array(state.get("sizes", np.zeros(2)))
        self.step_sums = list(state.get("step_sums", [np.nan] * self.num_steps))
        self.sketches.load_state_dict(state["sketches"])
        if "sums" in state:
            self.sums.load_state_dict(state["sums"])
            self.formats.load_state_dict(state["formats"])
            if "examples" in state:
                self.examples.load_state_dict(state["examples"])
            for name in _LATER:
                setattr(self, name, deepcopy(state[name]))
        else:  # of version 0.1, where nothing else was kept
            self.largest = [(np.nan, 0.0)] * self.num_steps
            self.covariates = {name: [np.nan] * self.num_steps for name in COVARIATES}


@dataclass(frozen=True, eq=False)
class Layout:
    """The kept coordinates: all, or for a large model the first of each leaf and a random sample."""

    num_parameters: int
    leaves: tuple[tuple[str, int], ...]
    kept: IntArray | None
    """The coordinates of the gradient that are kept; None for all."""
    starts: IntArray
    """The start of each leaf among the kept coordinates."""
    sizes: IntArray
    """The number of kept coordinates of each leaf."""
    sketch: IntArray
    """The coordinates, among those kept, that are kept for every step."""
    compared: IntArray
    """The leaves that are compared with each other."""
    heads: IntArray
    """Their leading kept coordinates: leaves x coordinates, -1 beyond the end of a short leaf."""

    @classmethod
    def of(cls, num_parameters: int, leaves: Leaves | None, sketch_size: int = _SKETCH) -> Layout:
        """Lay out gradients of this length, split into these leaves; None means a single leaf."""
        named = _named(leaves, num_parameters)
        lengths = np.array([size for _, size in named], dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        kept = _choose(offsets, lengths)
        coordinates = np.arange(num_parameters) if kept is None else kept
        starts = np.searchsorted(coordinates, offsets)
        sizes = np.diff(np.append(starts, coordinates.size))
        compared = np.unique(np.linspace(0, len(named) - 1, min(len(named), _MAX_COMPARED)).astype(np.int64))
        size = min(sketch_size, coordinates.size)
        return cls(
            num_parameters=num_parameters,
            leaves=named,
            kept=kept,
            starts=starts,
            sizes=sizes,
            sketch=_sketched(starts, sizes, size) if size > _OLD_SKETCH else _random(coordinates.size, size),
            compared=compared,
            heads=_heads(starts[compared], sizes[compared]),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves."""
        return tuple(name for name, _ in self.leaves)

    @property
    def sketch_sizes(self) -> list[int]:
        """The number of coordinates of each leaf that are kept for every step."""
        ends = np.searchsorted(self.sketch, np.append(self.starts, self.sizes.sum()))
        sizes: list[int] = np.diff(ends).tolist()
        return sizes

    def coordinate(self, index: int) -> int:
        """Return the coordinate of the gradient that is kept at this index."""
        return index if self.kept is None else int(self.kept[index])

    def is_like(self, leaves: Leaves) -> bool:
        """Return whether gradients with these leaves have this layout."""
        return _named(leaves, self.num_parameters) == self.leaves


def _number(name: str, value: float | None) -> float:
    """Return what describes a step as a number; NaN if it is not known."""
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"Expected {name}={quoted(value)} to be a number.") from error


def _named(leaves: Leaves | None, num_parameters: int) -> tuple[tuple[str, int], ...]:
    if leaves is None:
        return (("all", num_parameters),)
    if not isinstance(leaves, Iterable):
        raise InputError(f"Expected leaves=... as the sizes of parameters, got {quoted(leaves)}.")
    pairs = leaves.items() if isinstance(leaves, Mapping) else ((str(i), n) for i, n in enumerate(leaves))
    named = tuple((name, _validate.whole(f"the size of leaf {name}", size, 0)) for name, size in pairs)
    total = sum(size for _, size in named)
    if total != num_parameters:
        raise InputError(f"Expected leaves with {num_parameters} coordinates in total, got {total}.")
    return tuple((name, size) for name, size in named if size > 0)


def _choose(offsets: IntArray, lengths: IntArray) -> IntArray | None:
    total = int(lengths.sum())
    if total <= _MAX_COORDINATES:
        return None
    most = max(1, min(_PREFIX, _MAX_COORDINATES // (2 * lengths.size)))
    firsts = [np.arange(start, start + min(size, most)) for start, size in zip(offsets, lengths, strict=True)]
    others = fixed_rng(2).choice(total, size=_MAX_COORDINATES // 2, replace=False, shuffle=False)
    return np.unique(np.concatenate([*firsts, others]))


def _random(total: int, count: int) -> IntArray:
    return np.sort(fixed_rng(1).permutation(total)[:count])


def _sketched(starts: IntArray, sizes: IntArray, count: int) -> IntArray:
    """Choose coordinates that are kept for every step: all, or half of them at the beginning of leaves.

    Noise that is shared at an offset shows only where neighboring coordinates are kept.
    """
    total = int(sizes.sum())
    if total <= count:
        return np.arange(total)
    leaves = np.unique(np.linspace(0, sizes.size - 1, min(sizes.size, count // 2)).astype(np.int64))
    most = max(1, count // (2 * leaves.size))
    firsts = np.concatenate([starts[leaf] + np.arange(min(sizes[leaf], most)) for leaf in leaves])
    others = fixed_rng(1).permutation(total)
    return np.sort(np.concatenate([firsts, others[~np.isin(others, firsts)][: count - firsts.size]]))


def _heads(starts: IntArray, sizes: IntArray) -> IntArray:
    width = int(min(_PREFIX, sizes.max()))
    steps = np.arange(width)
    return np.where(steps < sizes[:, None], starts[:, None] + steps, -1)

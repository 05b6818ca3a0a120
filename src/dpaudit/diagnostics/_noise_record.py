"""The noise of a run in claimed standard deviations: what the noise tests read.

A :class:`NoiseRecord` has the noise at the coordinates of a :class:`Layout`: of a large model only some, and
of these only a sketch for every step. It has the precision of the releases, too, which :class:`FormatCheck`
recognizes by their numbers: the data type of an array does not show in which precision they were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._p_values import RESOLUTION, fixed_rng, sure_signs
from dpaudit.diagnostics._step import Leaves
from dpaudit.errors import InputError, quoted

_Array = TypeVar("_Array")
FEW_COORDINATES = 128
"""Coordinates that are kept for more steps, because equal noise needs few of them to be recognized."""
SKETCH = 1024  # coordinates that are kept for every step
_MAX_COORDINATES = 2**20  # coordinates kept for a large model
_PREFIX = 256  # leading coordinates of each leaf that are compared with those of other leaves
BFLOAT16, FLOAT16, SINGLE, DOUBLE = 2.0**-7, 2.0**-10, 2.0**-23, 2.0**-52  # relative precision
GRID_ERROR = 0.75
"""The error of a number on a grid, in spacings: half of it, with a margin for the sum."""

_GRID_SAMPLE, _MIN_SAMPLE = 8192, 64  # numbers by which a grid is found
_ON_GRID = 1 / 8  # largest distance of a number from the grid, in spacings


@dataclass(frozen=True, eq=False)
class Layout:
    """The kept coordinates: all, or for a large model the first of each leaf and a random sample."""

    num_parameters: int
    leaves: tuple[tuple[str, int], ...]
    chosen: IntArray | None
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
    """Their leading coordinates in the sketch: leaves x coordinates, -1 beyond the last of a leaf."""

    @classmethod
    def of(cls, num_parameters: int, leaves: Leaves | None) -> Layout:
        """Lay out gradients of this length, split into these leaves; None means a single leaf."""
        named = _named(leaves, num_parameters)
        lengths = np.array([size for _, size in named], dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        chosen = _choose(offsets, lengths)
        coordinates = np.arange(num_parameters) if chosen is None else chosen
        starts = np.searchsorted(coordinates, offsets)
        sizes = np.diff(np.append(starts, coordinates.size))
        max_compared = 64  # leaves that are compared with each other
        compared = np.unique(np.linspace(0, len(named) - 1, min(len(named), max_compared)).astype(np.int64))
        sketch = _sketched(starts, sizes, min(SKETCH, coordinates.size))
        return cls(
            num_parameters=num_parameters,
            leaves=named,
            chosen=chosen,
            starts=starts,
            sizes=sizes,
            sketch=sketch,
            compared=compared,
            heads=_heads(sketch, starts[compared], sizes[compared]),
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
        return index if self.chosen is None else int(self.chosen[index])

    def is_like(self, leaves: Leaves) -> bool:
        """Return whether gradients with these leaves have this layout."""
        return _named(leaves, self.num_parameters) == self.leaves


def _named(leaves: Leaves | None, num_parameters: int) -> tuple[tuple[str, int], ...]:
    if leaves is None:
        return (("all", num_parameters),)
    if not isinstance(leaves, Iterable):
        raise InputError(f"leaves must be the sizes of parameters, got {quoted(leaves)}.")
    pairs = leaves.items() if isinstance(leaves, Mapping) else ((str(i), n) for i, n in enumerate(leaves))
    named = tuple((name, _validate.integer(f"the size of leaf {name}", size, 0)) for name, size in pairs)
    total = sum(size for _, size in named)
    if total != num_parameters:
        raise InputError(f"leaves must have {num_parameters} coordinates in total, got {total}.")
    return tuple((name, size) for name, size in named if size > 0)


def _choose(offsets: IntArray, lengths: IntArray) -> IntArray | None:
    total = int(lengths.sum())
    if total <= _MAX_COORDINATES:
        return None
    most = max(1, min(_PREFIX, _MAX_COORDINATES // (2 * lengths.size)))
    firsts = [np.arange(start, start + min(size, most)) for start, size in zip(offsets, lengths, strict=True)]
    others = fixed_rng(2).choice(total, size=_MAX_COORDINATES // 2, replace=False, shuffle=False)
    return np.unique(np.concatenate([*firsts, others]))


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


def _heads(sketch: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """Return where the first coordinates of each leaf are in the sketch, as far as none is left out."""
    firsts = np.searchsorted(sketch, starts)
    offsets = np.arange(min(_PREFIX, int(sizes.max())))
    places = np.minimum(firsts[:, None] + offsets, sketch.size - 1)
    is_head = (sketch[places] == starts[:, None] + offsets) & (offsets < sizes[:, None])
    heads: IntArray = np.where(is_head, places, -1)
    return heads[:, : max(1, int(is_head.sum(axis=1).max()))]


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
    def sign_pairs(self) -> tuple[FloatArray, FloatArray]:
        """For each pair of leaves, how many signs of their leading coordinates agree, and how many differ.

        The remaining numbers are too small to have a sign.
        """
        return self.once("sign pairs", self._count_sign_pairs)

    def _count_sign_pairs(self) -> tuple[FloatArray, FloatArray]:
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


class FormatCheck:
    """The least precise format, at each coordinate, that can hold all releases so far.

    Numbers in fixed point may fit into a floating-point format by accident, but do not use its precision: in
    a floating-point format, small numbers are more precise than large ones.
    """

    def __init__(self) -> None:
        self._is_bfloat16 = self._is_float16 = self._is_single = np.ones(0, dtype=np.bool_)
        self._largest = np.zeros(0)
        self._finest = np.zeros(0)  # the lowest bit that is set, where a format of 16 bits is possible
        self._sample = np.zeros(0)  # the first numbers, until it is decided whether they are on a grid
        self._spacing = np.full(1, np.nan)  # of the grid; not a number if undecided, 0 without a grid

    def observe(self, released: FloatArray) -> None:
        """Add releases of steps exactly as they were returned, before they are multiplied by anything."""
        if self.is_empty:
            width = released.shape[1]
            self._is_single, self._is_float16, self._is_bfloat16 = np.ones((3, width), dtype=np.bool_)
            self._largest, self._finest = np.zeros(width), np.full(width, np.inf)
        for row in released if np.isnan(self._spacing[0]) else released[None]:
            self._observe_grid(row)
        self._largest = np.maximum(self._largest, np.abs(released).max(axis=0))
        with np.errstate(over="ignore"):
            single = released.astype(np.float32)
            self._is_single &= (single == released).all(axis=0)
            is_possible = self._is_single & (self._is_float16 | self._is_bfloat16)
            if is_possible.any():  # hardly anywhere, after one step
                self._is_float16 &= (single.astype(np.float16) == single).all(axis=0)
        if is_possible.any():
            self._is_bfloat16 &= ((single.view(np.uint32) & 0xFFFF) == 0).all(axis=0)
            finest = np.where(released == 0, np.inf, _lowest_bits(released)).min(axis=0)
            self._finest = np.minimum(self._finest, finest)
        self._is_float16 &= self._is_single
        self._is_bfloat16 &= self._is_single
        self._finest[~(self._is_float16 | self._is_bfloat16)] = np.inf

    def _observe_grid(self, values: FloatArray) -> None:
        if np.isnan(self._spacing[0]):
            self._sample = np.concatenate([self._sample, values.ravel()])
            if self._sample.size >= _GRID_SAMPLE:
                self._spacing[0], self._sample = find_spacing(self._sample), np.zeros(0)
        elif self._spacing[0] > 0 and _off_grid(values, float(self._spacing[0])).any():
            self._spacing[0] = 0.0

    def grid(self, noise: ScoreArray, unit: float) -> float:
        """Return the spacing of the grid on which all releases are, in units of the noise; 0 if none.

        ``unit`` is what 1 in a release is in units of the ``noise``. If the noise is on the same grid, so is
        the sum: then there may be no other rounding than that of the noise.
        """
        spacing_found = float(self._spacing[0])
        spacing = unit * (find_spacing(self._sample) if np.isnan(spacing_found) else spacing_found)
        coarsest = 0.07  # claimed standard deviations: a coarser grid could hide that noise is missing
        if not 0 < spacing <= coarsest:
            return 0.0
        same_grid = 1 / 64  # the same for noise, if the sum is on the grid too
        off_share = 0.01  # of the noise, below which the sum itself is on the grid
        return spacing if _off_grid(noise, spacing, same_grid).mean() > off_share else 0.0

    @property
    def is_empty(self) -> bool:
        """Whether no release was observed."""
        return self._is_single.size == 0

    def precision(self, leaves: Sequence[int]) -> FloatArray:
        """Return the relative precision at each coordinate: that of the numbers of its whole leaf.

        A single coordinate may have no contribution other than the noise, whose own lattice would then be
        taken for that of the release.
        """
        sizes = np.asarray([size for size in leaves if size > 0])
        starts = np.cumsum(sizes) - sizes
        largest = np.maximum.reduceat(self._largest, starts)
        finest = np.minimum.reduceat(self._finest, starts)
        precisions = np.full(sizes.size, DOUBLE)
        precisions[np.logical_and.reduceat(self._is_single, starts) | (largest == 0)] = SINGLE
        finer = 16.0  # times as precise as the largest is certainly the smallest of a few hundred numbers
        subnormal = 2.0**-24  # the smallest number in float16, where it is a fixed-point format
        for flags, eps in ((self._is_float16, FLOAT16), (self._is_bfloat16, BFLOAT16)):
            spacing = eps * np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))))
            is_floating = (finest < spacing / finer) | (finest <= subnormal)
            precisions[np.logical_and.reduceat(flags, starts) & is_floating] = eps
        return np.repeat(precisions, sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        return {name: value.copy() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        vars(self).update({name: np.array(value) for name, value in state.items()})


def find_spacing(values: FloatArray) -> float:
    """Return the spacing of the grid on which all numbers are; 0 if there is none or they are too few."""
    ordered = np.unique(np.abs(values))
    gaps = np.diff(ordered, prepend=0.0)
    gaps = gaps[gaps > SINGLE * ordered[-1:].max(initial=0.0)]  # smaller ones may be rounding errors
    if values.size < _MIN_SAMPLE or gaps.size == 0:
        return 0.0
    max_divisor = 4  # the smallest gap between two numbers may be a small multiple of the spacing
    for divisor in range(1, max_divisor + 1):
        spacing = _refined(ordered, float(gaps.min()) / divisor)
        if not _off_grid(ordered, spacing).any():
            return spacing
    return 0.0


def _refined(ordered: FloatArray, spacing: float) -> float:
    """Return the spacing that fits best: small multiples first, as a small error adds up in large ones."""
    limit = 16 * spacing
    while True:
        near = ordered[: np.searchsorted(ordered, limit)]
        multiples = np.rint(near / spacing)
        if multiples.any():
            spacing = float((near * multiples).sum() / (multiples * multiples).sum())
        if limit > ordered[-1]:
            return spacing
        limit *= 16


def _off_grid(values: ScoreArray, spacing: float, tolerance: float = _ON_GRID) -> BoolArray:
    """Return which numbers are clearly not multiples of the spacing."""
    multiples = values / spacing
    is_off: BoolArray = np.abs(multiples - np.rint(multiples)) > tolerance
    return is_off


def _lowest_bits(values: FloatArray) -> FloatArray:
    """Return the value of the lowest bit that is set in each number of at most 24 bits."""
    fractions, exponents = np.frexp(values)
    whole = np.abs(np.ldexp(fractions, 24)).astype(np.int64)
    bits: FloatArray = np.ldexp((whole & -whole).astype(np.float64), exponents - 24)
    return bits

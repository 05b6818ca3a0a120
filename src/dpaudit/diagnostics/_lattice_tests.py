"""The numbers of noise and releases: their formats, grids, and noise that takes too few values.

The low bits of a release whose noise is on a lattice reveal the sum: noise that is drawn in low precision, on
a grid, from a table, or reused. Numbers that are equal, up to the precision of the release, are counted among
all steps and coordinates, whatever their places and signs.

A release that is itself stored in low precision has ties too, but its final rounding hides the lattice of the
noise from everybody, and so does rounding to a grid. Both are recognized by their numbers, because the data
type of an array does not show in which precision they were computed; ties are then not tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._p_values import Check, bonferroni

if TYPE_CHECKING:
    from dpaudit.diagnostics._noise_record import NoiseRecord

BFLOAT16, FLOAT16, SINGLE, DOUBLE = 2.0**-7, 2.0**-10, 2.0**-23, 2.0**-52  # relative precision
GRID_ERROR = 0.75
"""The error of a number on a grid, in spacings: half of it, with a margin for the sum."""

_GRID_SAMPLE, _MIN_SAMPLE = 8192, 64  # numbers by which a grid is found
_ON_GRID = 1 / 8  # largest distance of a number from the grid, in spacings
# Noise in single precision is legitimate in any release. Half the distance of its numbers, with a margin; the
# 2^23 numbers that jax.random.normal returns are farther apart, but the slack below covers them.
_SINGLE_ERROR = 1.5 * SINGLE / 2
_MAX_ERROR = 2.0**-14  # in claimed standard deviations: coarser numbers are not tested
_NUM_BLOCKS, _MIN_BLOCKS, _MIN_BLOCK = 128, 4, 64
_MAX_NUMBERS, _MAX_PAIRS = 2**19, 2**15
_DISTANCES = (1, 8)  # distances of two numbers that one Box-Muller transformation returns; 8 in torch


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
                self._spacing[0], self._sample = _find_spacing(self._sample), np.zeros(0)
        elif self._spacing[0] > 0 and _off_grid(values, float(self._spacing[0])).any():
            self._spacing[0] = 0.0

    def grid(self, noise: ScoreArray, unit: float) -> float:
        """Return the spacing of the grid on which all releases are, in units of the noise; 0 if none.

        ``unit`` is what 1 in a release is in units of the ``noise``. If the noise is on the same grid, so is
        the sum: then there may be no other rounding than that of the noise.
        """
        spacing_found = float(self._spacing[0])
        spacing = unit * (_find_spacing(self._sample) if np.isnan(spacing_found) else spacing_found)
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


def _find_spacing(values: FloatArray) -> float:
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


def tied_noise(record: NoiseRecord) -> Check | None:
    """Count absolute values that are equal up to rounding; a Chernoff bound for Poisson counts.

    A tie is a gap between neighbors, in order of size, of at most the sum of their rounding errors. The
    expected number follows from the density of the numbers themselves, so no scale is assumed.
    """
    stride = -(-record.rows.size // _MAX_NUMBERS)
    rows, errors = _with_errors(record, slice(None, None, stride))
    values, errors = np.abs(rows, out=rows).ravel(), errors.ravel()
    is_tested = _is_tested(values, errors)
    p_value, share, count = _tie_p_value(values[is_tested], errors[is_tested])
    if count == 0:
        return None
    grid = _find_spacing(values[is_tested]) if p_value < 1e-3 else 0.0  # or needs no explanation
    where = (
        f": all of it is on a grid with a spacing of {grid:.2g} claimed standard deviations" if grid else ""
    )
    return Check(
        name="tied-noise",
        p_value=p_value,
        sentence=f"The same numbers recur in the noise: {100 * share:.2g} % of {count:,} numbers equal "
        f"another up to sign and rounding{where}.",
        estimate=share,
    )


def tied_pairs(record: NoiseRecord) -> Check | None:
    """Count ties of the radii and angles of pairs, which are uniform numbers before a Box-Muller transform.

    The p-value is corrected for the distances of the two numbers and for radii and angles.
    """
    pairs, results, names = _pairs(record, record.rows.shape[1]), [], []
    most = max((_num_steps(first) for _, first, _ in pairs), default=1)
    rows, errors = _with_errors(record, slice(0, most))
    for name, first, second in pairs:
        steps = slice(0, _num_steps(first))
        x, y = rows[steps, first].ravel(), rows[steps, second].ravel()
        x_error, y_error = errors[steps, first].ravel(), errors[steps, second].ravel()
        squares = x * x + y * y
        is_tested = _is_tested(x, x_error) & _is_tested(y, y_error)
        x, y, x_error, y_error = (values[is_tested] for values in (x, y, x_error, y_error))
        squares = squares[is_tested]
        halves = np.abs(x) * x_error + np.abs(y) * y_error
        turns = (np.abs(x) * y_error + np.abs(y) * x_error) / squares
        results += [_tie_p_value(squares / 2, halves), _tie_p_value(np.abs(np.arctan2(y, x)), turns)]
        names += [f"radii of pairs of numbers {name}", f"angles of pairs of numbers {name}"]
    if not any(count for _, _, count in results):
        return None
    best = int(np.argmin([p_value for p_value, _, _ in results]))
    p_value, share, count = results[best]
    return Check(
        name="tied-pairs",
        p_value=bonferroni(p_value, len(results)),
        sentence=f"The noise is computed from too few random numbers: {100 * share:.2g} % of {count:,} "
        f"{names[best]} equal another.",
        estimate=share,
    )


def is_coarse(record: NoiseRecord) -> BoolArray:
    """Return for each coordinate whether the release is too coarse there to see the lattice of its noise."""
    width = record.layout.sketch.size
    is_rounded = record.rounding > _MAX_ERROR or record.grid > 0
    result: BoolArray = (record.release_precision >= FLOAT16) | np.full(width, is_rounded)
    return result


def _num_steps(coordinates: IntArray) -> int:
    """Return how many steps are enough for the largest number of pairs."""
    return max(1, _MAX_PAIRS // coordinates.size)


def _with_errors(record: NoiseRecord, steps: slice) -> tuple[FloatArray, FloatArray]:
    """Return the noise of some of the kept steps and the rounding error of each number."""
    rows, sums = record.rows[steps].astype(np.float64), record.sums
    released = np.abs(rows if sums is None else rows + sums[steps])
    # Error of a number, in units of its last place. A release that is rounded once is itself on a lattice:
    # ties must be counted at 1.5 times its spacing at least, or the slack for lattices does not cover it.
    roundings = 0.75
    released *= roundings * record.release_precision
    errors = np.abs(rows)  # in place from here on: most of the time is spent on memory
    np.maximum(errors, 1.0, out=errors)
    errors *= _SINGLE_ERROR  # of noise in single precision, which is also how it is kept
    errors += released
    errors += record.rounding
    errors[:, is_coarse(record)] = np.inf
    return rows, errors


def _is_tested(values: FloatArray, errors: FloatArray) -> BoolArray:
    min_multiple = 64.0  # times its error: smaller numbers may be rounding errors alone
    result: BoolArray = (errors <= _MAX_ERROR) & (np.abs(values) > min_multiple * errors)
    return result


def _tie_p_value(values: FloatArray, errors: FloatArray) -> tuple[float, float, int]:
    """Return the p-value of the number of ties, their share, and how many numbers were tested."""
    count = values.size
    num_blocks = min(_NUM_BLOCKS, count // _MIN_BLOCK)
    if num_blocks < _MIN_BLOCKS:
        return 1.0, 0.0, 0
    values, errors = _sorted(values, errors)
    num_outside = 1 / 32  # share of the largest numbers, whose density varies too much
    inside = math.floor(count * (1 - num_outside))
    tolerance = errors[: inside - 1] + errors[1:inside]
    ties = int(np.count_nonzero(np.diff(values[:inside]) <= tolerance))
    edges = np.linspace(0, count - 1, num_blocks + 1).astype(np.int64)
    with np.errstate(divide="ignore"):
        density = np.diff(edges) / np.diff(values[edges])
    # in a block of equal numbers the density is infinite, and nothing is concluded
    # On a lattice whose spacing is the tolerance, ties are 1.5 times as frequent as for continuous noise.
    lattice_slack = 1.5
    rates = lattice_slack * np.repeat(density, np.diff(edges))[: inside - 1] * tolerance
    density_slack = 1.05  # the density varies within a block
    expected = float(-np.expm1(-rates).sum()) * density_slack
    return _poisson_p_value(ties, expected), ties / inside, inside


def _sorted(values: FloatArray, errors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return nonnegative numbers in order of size, with their errors, rounded up to a power of two.

    The exponent of an error replaces the lowest bits of its number, whose bits are in the same order as the
    number itself: sorting these integers is many times faster than sorting indices.
    """
    lowest, mask = -48, np.uint64(63)  # exponents of errors from -48 to 15
    codes = np.clip(np.frexp(errors)[1] - lowest, 0, 63).astype(np.uint64)
    keys = np.sort((values.view(np.uint64) & ~mask) | codes)
    codes = keys & mask
    return (keys - codes).view(np.float64), np.ldexp(1.0, codes.astype(np.int64) + lowest)


def _poisson_p_value(count: float, mean: float) -> float:
    """Return Chernoff's bound on the probability that a Poisson variable is at least ``count``."""
    if count <= mean:
        return 1.0
    return math.exp(min(0.0, count - mean - count * math.log(count / mean)))


def _pairs(record: NoiseRecord, width: int) -> list[tuple[str, IntArray, IntArray]]:
    """Return which coordinates are compared, and how their distance is described."""
    where = np.arange(width)
    pairs = [
        ("next to each other" if step == 1 else f"{step} apart", where[:-step], where[step:])
        for step in _DISTANCES
        if step < width
    ]
    for name, sizes in (("vector", [width]), ("leaf", record.layout.sketch_sizes)):
        starts = np.cumsum(sizes) - sizes
        halves = [start + np.arange(size // 2) for start, size in zip(starts, sizes, strict=True)]
        others = [half + size // 2 for half, size in zip(halves, sizes, strict=True)]
        is_new = name == "vector" or len(sizes) > 1
        if is_new and sum(half.size for half in halves) > max(_DISTANCES):
            pairs.append((f"half a {name} apart", np.concatenate(halves), np.concatenate(others)))
    return pairs


LATTICE_TESTS = (tied_noise, tied_pairs)

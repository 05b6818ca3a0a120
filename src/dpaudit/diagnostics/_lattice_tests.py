"""Tests of noise that takes too few values: drawn in low precision, on a grid, from a table, or reused.

The low bits of a release whose noise is on a lattice reveal the sum. Numbers that are equal, up to the
precision of the release, are counted among all steps and coordinates, whatever their places and signs.

A release that is itself stored in low precision has ties too, but its final rounding hides the lattice of the
noise from everybody, and so does rounding to a grid. Both are recognized by their numbers
(``_number_formats``); ties are then not tested.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._number_formats import FLOAT16, SINGLE
from dpaudit.diagnostics._p_values import Check, bonferroni

# Noise in single precision is legitimate in any release. Half the distance of its numbers, with a margin; the
# 2^23 numbers that jax.random.normal returns are farther apart, but the slack below covers them.
_SINGLE_ERROR = 1.5 * SINGLE / 2
_MAX_ERROR = 2.0**-14  # in claimed standard deviations: coarser numbers are not tested
_NUM_BLOCKS, _MIN_BLOCKS, _MIN_BLOCK = 128, 4, 64
_CODES, _EXPONENT_BIAS = 64, 48  # exponents of errors from -48 to 15
_FRACTION_BITS, _DOUBLE_BIAS = 52, 1022  # of double precision; numbers with exponent 0 are from 1/2 to 1
_MAX_NUMBERS, _MAX_PAIRS = 2**19, 2**15
_DISTANCES = (1, 8)  # distances of two numbers that one Box-Muller transformation returns; 8 in torch


def tied_noise(record: NoiseRecord) -> Check | None:
    """Count absolute values that are equal up to rounding; a Chernoff bound for Poisson counts.

    A tie is a gap between neighbors, in order of size, of at most the sum of their rounding errors. The
    expected number follows from the density of the numbers themselves, so no scale is assumed.
    """
    stride = -(-record.rows.size // _MAX_NUMBERS)
    rows, errors = _with_errors(record, slice(None, None, stride))
    values, order = np.abs(rows, out=rows).ravel(), errors.ravel()
    is_tested = _is_tested(values, order)
    p_value, share, count = _tie_p_value(values[is_tested], order[is_tested])
    if count == 0:
        return None
    grid = _grid(values[is_tested], order[is_tested]) if p_value < 1e-3 else None  # or needs no explanation
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
    exponents = (errors.view(np.int64) >> _FRACTION_BITS) - (_DOUBLE_BIAS - _EXPONENT_BIAS)
    codes = np.clip(exponents, 0, _CODES - 1, out=exponents).view(np.uint64)
    keys = values.view(np.uint64) & ~np.uint64(_CODES - 1)
    keys |= codes
    keys = _sorted_keys(keys, values)
    codes = keys & np.uint64(_CODES - 1)
    table = np.ldexp(1.0, np.arange(_CODES) - _EXPONENT_BIAS)
    return (keys - codes).view(np.float64), table[codes.astype(np.int64)]


def _sorted_keys(keys: npt.NDArray[np.uint64], values: FloatArray) -> npt.NDArray[np.uint64]:
    """Return the keys of nonnegative numbers in order.

    Sorting them first by 16 bits, for which there is a radix sort, takes half the time: what remains is to
    sort within short runs.
    """
    places_per_unit = 2.0**14  # places on which numbers are sorted first
    places = np.minimum(values * places_per_unit, 2.0**16 - 1).astype(np.uint16)
    ordered = keys[np.argsort(places, kind="stable")]
    ordered.sort(kind="stable")
    return ordered


def _poisson_p_value(count: float, mean: float) -> float:
    """Return Chernoff's bound on the probability that a Poisson variable is at least ``count``."""
    if count <= mean:
        return 1.0
    return math.exp(min(0.0, count - mean - count * math.log(count / mean)))


def _grid(values: FloatArray, errors: FloatArray) -> float | None:
    """Return the spacing of the grid on which all numbers are, if there is one."""
    ordered, tolerance = _sorted(values, errors)
    gaps = np.diff(ordered)
    distinct = gaps[gaps > 4 * (tolerance[:-1] + tolerance[1:])]
    if distinct.size < 8:
        return None
    spacing = float(np.quantile(distinct, 0.1))
    near = ordered[: max(16, np.searchsorted(ordered, 64 * spacing))]
    near = near[near > spacing / 2]
    if near.size == 0:
        return None
    for _ in range(3):  # refine: the first estimate has a rounding error
        multiples = np.rint(near / spacing)
        spacing = float((near * multiples).sum() / (multiples * multiples).sum())
    off = np.abs(near - spacing * np.rint(near / spacing))
    return spacing if (off < spacing / 16).all() else None


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

"""Tests of the distribution of the noise: its shape, its tails, its values, and whether it is too regular.

Noise without tails reveals that some sums are impossible, and a few numbers in ten thousand decide it, which
a test of the whole distribution does not see. Too few large numbers are counted in claimed standard
deviations, so that more noise than claimed is never a finding; too many, after the scales of steps and
coordinates cancel.

Noise that is centered, normalized or stratified looks normal in every single coordinate, but what it lacks
is revealed: the mean of a centered release is the mean of the sum, without any noise. The tests of sums and
norms look at parts of the noise in turn: at steps, at the leaves of each step, and at coordinates over all
steps. Their p-values are corrected for the number of these views.

The low bits of a release whose noise is on a lattice reveal the sum: noise that is drawn in low precision, on
a grid, from a table, or reused. Numbers that are equal, up to the precision of the release, are counted among
all steps and coordinates, whatever their places and signs. A release that is itself in low precision or on a
grid has ties too, but its final rounding hides the lattice of the noise from everybody: ties are not tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy
from scipy import special

from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._dependence_tests import SingleArray, scaled_noise
from dpaudit.diagnostics._noise_record import FLOAT16, SINGLE, NoiseRecord, find_spacing
from dpaudit.diagnostics._p_values import Check, bonferroni, chi_square_cdf, uniform_p_value

_MAX_RATIOS = 2**17  # number of cross ratios that are tested
_SHORT_TAIL_LEVELS = np.arange(1.0, 5.0, 0.5)  # thresholds beyond which there may be too few numbers
# Thresholds beyond which there may be too many: beyond sqrt(3), dividing by a standard deviation of the same
# numbers makes large numbers rarer than those of a normal distribution.
_LONG_TAIL_LEVELS = np.arange(2.0, 5.0, 0.5)
_ALL_STEPS = "all steps"
# Noise in single precision is legitimate in any release. Half the distance of its numbers, with a margin; the
# 2^23 numbers that jax.random.normal returns are farther apart, but the slack below covers them.
_SINGLE_ERROR = 1.5 * SINGLE / 2
_MAX_ERROR = 2.0**-14  # in claimed standard deviations: coarser numbers are not tested
_NUM_BLOCKS, _MIN_BLOCKS, _MIN_BLOCK = 128, 4, 64
_MAX_NUMBERS, _MAX_PAIRS = 2**19, 2**15
_DISTANCES = (1, 8)  # distances of two numbers that one Box-Muller transformation returns; 8 in torch


def noise_shape(record: NoiseRecord) -> Check | None:
    """Test cross ratios of two coordinates in two steps against those of normal noise (Kolmogorov-Smirnov).

    The scales of coordinates and steps cancel, so neither a claimed nor an estimated variance is needed.
    """
    ratios = _cross_ratios(record.rows)
    if ratios is None:
        return None
    levels = cross_ratio_cdf(ratios)
    mean = float(levels.mean()) if levels.size else 0.5
    tails = "longer" if mean > 0.5 else "shorter"
    # Largest effect of rounding on the distribution of cross ratios, in units of the resolution: 4.1 if each
    # of the four numbers is rounded in the worst direction (simulated).
    ratio_tolerance = 5.0
    return Check(
        name="noise-shape",
        p_value=uniform_p_value(levels, ratio_tolerance * record.resolution),
        sentence=f"The noise is not normal: its tails are {tails} than those of normal noise.",
        estimate=mean,
    )


def cross_ratio_cdf(ratios: FloatArray) -> FloatArray:
    """Return the distribution function of absolute logarithms of cross ratios of normal variables.

    A cross ratio is a product of two Cauchy variables: the density of its logarithm is proportional to
    r / sinh(r).
    """
    inverse = np.exp(-ratios)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = ratios * np.log(np.tanh(ratios / 2))
        rest = special.spence(1 - inverse) - special.spence(1 + inverse)
        values = 1 + 4 / math.pi**2 * (first - rest)
    return np.clip(np.where(ratios == 0, 0.0, np.where(np.isinf(ratios), 1.0, values)), 0.0, 1.0)


def _cross_ratios(rows: SingleArray) -> FloatArray | None:
    """Return absolute logarithms of cross ratios from disjoint blocks.

    Coordinates or steps of zeros have no cross ratio, nor do equal steps, which another test detects.
    """
    if min(rows.shape) < 2:
        return None
    num_pairs = min(len(rows) // 2, -(-_MAX_RATIOS // (rows.shape[1] // 2)))  # of steps
    even = rows[: 2 * num_pairs, : rows.shape[1] // 2 * 2].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.abs(even))
        across = logs[:, ::2] - logs[:, 1::2]
        ratios: FloatArray = np.abs(across[::2] - across[1::2]).ravel()[:_MAX_RATIOS]
    return ratios[ratios > 0]


def missing_tail(record: NoiseRecord) -> Check | None:
    """Test the largest numbers of the steps, over all coordinates: noise that is cut off has none.

    In a step with n numbers, -n log P(|x| < largest) is exponential. The smallest of these over all steps is
    tested and their sum, which has a gamma distribution. Where the noise of the whole run is below
    the claim, numbers are compared with that smaller noise, because the amount has a test of its own.
    """
    maxima = np.asarray([pair for pair in record.largest if pair[1] > 0])
    if maxima.size == 0 or record.energy == 0:
        return None
    largest = (maxima[:, 0] + record.resolution) / _scale(record)
    waits = -maxima[:, 1] * np.log1p(-2 * scipy.stats.norm.sf(largest))
    p_total = float(scipy.stats.gamma.sf(waits.sum(), len(waits)))
    p_values = math.exp(-len(waits) * float(waits.min())), p_total
    top = float(maxima[:, 0].max())
    return Check(
        name="missing-tail",
        p_value=bonferroni(min(p_values), len(p_values)),
        sentence=f"The noise has no tails: the largest of {int(maxima[:, 1].sum()):,} numbers is {top:.3g} "
        "claimed standard deviations.",
        estimate=top,
    )


def noise_tails(record: NoiseRecord) -> Check | None:
    """Count large numbers at several thresholds: binomial, corrected for all thresholds.

    Too few are counted in claimed standard deviations, or in those of the whole run if they are smaller.
    """
    rows = record.rows
    min_size = 8  # steps and coordinates that are needed for scales
    if min(rows.shape) < min_size or record.energy == 0:
        return None
    few = _beyond(rows, _SHORT_TAIL_LEVELS)
    expected = 2 * scipy.stats.norm.sf((_SHORT_TAIL_LEVELS + record.resolution) / _scale(record))
    p_few = np.asarray(scipy.stats.binom.cdf(few, rows.size, expected))
    many = _beyond(scaled_noise(record), _LONG_TAIL_LEVELS)
    usual = 2 * scipy.stats.norm.sf(_LONG_TAIL_LEVELS - 2 * record.resolution)
    p_many = np.asarray(scipy.stats.binom.sf(many - 1, rows.size, usual))
    short = zip(p_few, _SHORT_TAIL_LEVELS, few / np.maximum(rows.size * expected, 1.0), strict=True)
    long = zip(p_many, _LONG_TAIL_LEVELS, many / (rows.size * usual), strict=True)
    results = [("short", *result) for result in short] + [("long", *result) for result in long]
    word, p_value, threshold, ratio = min(results, key=lambda result: float(result[1]))
    return Check(
        name="noise-tails",
        p_value=bonferroni(p_value, len(results)),
        sentence=f"The tails of the noise are too {word}: {ratio:.2g} times as many numbers as in normal "
        f"noise exceed {threshold:g} standard deviations.",
        estimate=float(ratio),
    )


def _scale(record: NoiseRecord) -> float:
    """Return the noise in claimed standard deviations, at most 1."""
    return min(1.0, math.sqrt(record.energy / record.count))


def _beyond(rows: ScoreArray, thresholds: FloatArray) -> FloatArray:
    """Return how many absolute values are above each of the thresholds, which increase."""
    values, counts = np.abs(rows).ravel(), []
    for threshold in thresholds:
        values = values[values > threshold]
        counts.append(float(values.size))
    return np.asarray(counts)


@dataclass(frozen=True, eq=False)
class _View:
    """Sums and energies of parts of the noise, each of ``width`` numbers."""

    name: str
    width: int
    sums: FloatArray
    energies: FloatArray


def balanced_noise(record: NoiseRecord) -> Check | None:
    """Test squared sums of noise, over a step, a leaf or all steps: chi-square, too small.

    A sum of independent normal numbers is normal, and its variance is at least their number if none has less
    noise than claimed. More noise in some of them, whatever their scales, makes the p-value larger. Where
    there is less noise, which is another finding, sums are compared with the noise that there is.
    """
    return _balanced(record, _views(record))


def balanced_steps(record: NoiseRecord) -> Check | None:
    """Test the same within steps: weight decay makes sums over all steps smaller."""
    return _balanced(record, [view for view in _views(record) if view.name != _ALL_STEPS])


def _balanced(record: NoiseRecord, views: Iterable[_View]) -> Check | None:
    results = []
    for view in views:
        level = min(1.0, float(view.energies.sum()) / (view.width * view.energies.size))
        if level == 0:
            continue
        largest = np.abs(view.sums) + record.resolution * view.width
        total = float((largest * largest).sum()) / view.width
        p_value = chi_square_cdf(total / level, view.sums.size)
        share = float((view.sums * view.sums).sum()) / view.width / view.sums.size
        results.append((p_value, share, view.name))
    if not results:
        return None
    p_value, share, name = min(results)
    over_time = "is the noise of earlier steps subtracted again, or is it stratified over the steps?"
    return Check(
        name="balanced-noise",
        p_value=bonferroni(p_value, len(results)),
        sentence=f"Noise adds up to too little: squared sums over {name} are {share:.3g} times those of "
        "independent noise.",
        estimate=share,
        cause=over_time if name == _ALL_STEPS else "",
    )


def constant_norm(record: NoiseRecord) -> Check | None:
    """Test the norms of noise, of a step, a leaf or a coordinate: too alike in pairs of neighbors.

    Standard normal numbers are their norm times an independent direction. Scaling them multiplies their
    energy by a number that depends on the direction alone. So the logarithm of the ratio of two energies is
    that of an F variable, which is symmetric and unimodal, plus an independent number. It is close to zero
    most often if that number is zero, as for equal scales: the probability that the F variable is at least as
    close is a p-value, whatever the scales, and Fisher's method joins those of all pairs.
    """
    results = []
    for view in _views(record):
        p_values = _alike(view.energies, view.width, record.resolution)
        if p_values.size:
            fisher = float(special.gammaincc(p_values.size, -np.log(p_values).sum()))
            results.append((fisher, _relative_spread(view), view.name))
    if not results:
        return None
    p_value, spread, name = min(results)
    return Check(
        name="constant-norm",
        p_value=bonferroni(p_value, len(results)),
        sentence=f"Noise has almost the same norm again and again: energies over {name} vary "
        f"{spread:.3g} times as much as those of normal noise.",
        estimate=spread,
    )


def _alike(energies: FloatArray, width: int, resolution: float) -> FloatArray:
    """Return for each pair of neighbors how probable a ratio of their energies is that is as close to 1."""
    norms = np.sqrt(energies[: energies.size // 2 * 2]).reshape(-1, 2)
    error = resolution * width**0.5
    small, large = norms.min(axis=1) - error, norms.max(axis=1) + error
    is_sure = small > 0
    share = small[is_sure] ** 2 / (small[is_sure] ** 2 + large[is_sure] ** 2)
    close: FloatArray = np.ones(len(norms))
    least = 1e-9  # smaller probabilities of a pair may be rounding errors
    close[is_sure] = np.maximum(1 - 2 * special.betainc(width / 2, width / 2, share), least)
    return close


def _relative_spread(view: _View) -> float:
    """Return the variance of energies, over that of normal noise with the same mean."""
    pairs = view.energies[: view.energies.size // 2 * 2].reshape(-1, 2)
    usual = 2 * float((pairs**2).sum()) / (view.width + 2)
    return float(((pairs[:, 0] - pairs[:, 1]) ** 2).sum()) / max(usual, 1e-300)


def _views(record: NoiseRecord) -> list[_View]:
    return record.once("views", lambda: list(_all_views(record)))


def _all_views(record: NoiseRecord) -> Iterator[_View]:
    rows, sizes = record.rows, np.asarray(record.layout.sketch_sizes)
    size = record.energies.size
    sums = np.asarray(record.step_sums)
    if size > 1:
        yield _View("a step", size, sums, np.asarray(record.step_energies))
    squares = np.multiply(rows, rows, dtype=np.float64)
    used = np.flatnonzero(sizes)
    if used.size > 1:
        starts = (np.cumsum(sizes) - sizes)[used]
        leaves = [np.add.reduceat(values, starts, axis=1).astype(np.float64) for values in (rows, squares)]
        large = [number for number in range(used.size) if sizes[used[number]] > 1]
        max_leaves = 64  # that are tested alone
        for number in sorted(large, key=lambda leaf: -sizes[used[leaf]])[:max_leaves]:
            name, width = record.layout.names[used[number]], int(sizes[used[number]])
            yield _View(f"leaf {name}", width, leaves[0][:, number], leaves[1][:, number])
    if len(rows) > 1:
        totals = (values.sum(axis=0, dtype=np.float64) for values in (rows, squares))
        yield _View(_ALL_STEPS, len(rows), *totals)


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
    grid = find_spacing(values[is_tested]) if p_value < 1e-3 else 0.0  # or needs no explanation
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


SHAPE_TESTS = (noise_shape, missing_tail, noise_tails, tied_noise, tied_pairs)
REGULARITY_TESTS = (balanced_noise, constant_norm)

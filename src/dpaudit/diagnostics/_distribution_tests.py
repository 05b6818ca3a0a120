"""Tests of the distribution of the noise: its shape, its tails, and whether it is too regular.

Noise without tails reveals that some sums are impossible, and a few numbers in ten thousand decide it, which
a test of the whole distribution does not see. Too few large numbers are counted in claimed standard
deviations, so that more noise than claimed is never a finding; too many, after the scales of steps and
coordinates cancel.

Noise that is centered, normalized or stratified looks normal in every single coordinate, but what it lacks
is revealed: the mean of a centered release is the mean of the sum, without any noise. The tests of sums and
norms look at parts of the noise in turn: at steps, at the leaves of each step, and at coordinates over all
steps. Their p-values are corrected for the number of these views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy
from scipy import special

from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._dependence_tests import SingleArray, scaled_noise
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import Check, bonferroni, chi_square_cdf, uniform_p_value

_MAX_RATIOS = 2**17  # number of cross ratios that are tested
_SHORT_TAIL_LEVELS = np.arange(1.0, 5.0, 0.5)  # thresholds beyond which there may be too few numbers
# Thresholds beyond which there may be too many: beyond sqrt(3), dividing by a standard deviation of the same
# numbers makes large numbers rarer than those of a normal distribution.
_LONG_TAIL_LEVELS = np.arange(2.0, 5.0, 0.5)
_ALL_STEPS = "all steps"


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
    p_value = min(float(p_few.min()), float(p_many.min()))
    if p_few.min() <= p_many.min():
        best = int(np.argmin(p_few))
        word, threshold, ratio = (
            "short",
            _SHORT_TAIL_LEVELS[best],
            few[best] / max(rows.size * expected[best], 1.0),
        )
    else:
        best = int(np.argmin(p_many))
        word, threshold, ratio = "long", _LONG_TAIL_LEVELS[best], many[best] / (rows.size * usual[best])
    return Check(
        name="noise-tails",
        p_value=bonferroni(p_value, _SHORT_TAIL_LEVELS.size + _LONG_TAIL_LEVELS.size),
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
        leaves = _of_leaves(rows, starts), _of_leaves(squares, starts)
        large = [number for number in range(used.size) if sizes[used[number]] > 1]
        max_leaves = 64  # that are tested alone
        for number in sorted(large, key=lambda leaf: -sizes[used[leaf]])[:max_leaves]:
            name, width = record.layout.names[used[number]], int(sizes[used[number]])
            yield _View(f"leaf {name}", width, leaves[0][:, number], leaves[1][:, number])
    if len(rows) > 1:
        totals = (values.sum(axis=0, dtype=np.float64) for values in (rows, squares))
        yield _View(_ALL_STEPS, len(rows), *totals)


def _of_leaves(rows: ScoreArray, starts: IntArray) -> FloatArray:
    """Return the sum of each leaf in each step."""
    return np.add.reduceat(rows, starts, axis=1).astype(np.float64)


SHAPE_TESTS = (noise_shape, missing_tail, noise_tails)
REGULARITY_TESTS = (balanced_noise, constant_norm)

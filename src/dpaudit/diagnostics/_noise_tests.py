"""Tests of the noise of a training: amount, shape, repetition and correlation.

Under the null hypothesis of each, all noise is normal, independent, and at least as large as claimed. The
null distribution is named with each test; those that several tests share are in ``_tests``. To add a test,
write a function from a ``NoiseRecord`` to a ``Check``, None where there is too little to test, and register
it in ``NOISE_TESTS`` below; what may cause its finding goes into ``_causes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from dpaudit._types import ArrayLike, BoolArray, FloatArray, IntArray
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import (
    Check,
    bonferroni,
    claim_p_value,
    pairwise_products,
    share_p_value,
    sign_correlation,
    sign_p_value,
    sign_sum_p_value,
    sure_signs,
    uniform_p_value,
)

_SURE_P_VALUE = 1e-6  # how unlikely each part is that is counted as one without its noise
_MAX_RATIOS = 2**17  # cross ratios that are tested
# What rounding can do to the distribution of cross ratios, in units of the resolution: 4.1 where each of
# the four numbers is moved to the worse side (simulated).
_RATIO_TOLERANCE = 5.0
_SAME = 0.95  # the correlation from which on noise is called the same, if its length is too
_MAX_LAG = 16  # steps between two that are compared
_SUSPICIOUS = 0.05  # p-values above it are no finding at any level that is used


def noise_checks(record: NoiseRecord, confidence: float) -> list[Check]:
    """Run all tests for which there are enough steps, leaves and coordinates, whatever their results."""
    if record.num_steps == 0:
        return []
    found = [noise_variance(record, confidence), *(test(record) for test in NOISE_TESTS)]
    return [check for check in found if check is not None]


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The noise over the claim; the interval holds at ``confidence`` if all noise is independent."""

    ratio: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return (
            f"{self.ratio:.4g} of the claim ({100 * self.confidence:g} % interval "
            f"{self.low:.4g} to {self.high:.4g})"
        )


def noise_amount(record: NoiseRecord, confidence: float) -> Amount:
    """Return how much noise there is, with the interval of a chi-square distribution."""
    tail = (1 - confidence) / 2
    low, high = (record.energy / float(stats.chi2.isf(q, record.count)) for q in (tail, 1 - tail))
    return Amount(
        ratio=math.sqrt(record.energy / record.count),
        low=math.sqrt(low),
        high=math.sqrt(high),
        confidence=confidence,
    )


def noise_variance(record: NoiseRecord, confidence: float) -> Check:
    """Test all squares together: chi-square, if there is as much noise as claimed."""
    found = noise_amount(record, confidence)
    return Check(
        name="noise-variance",
        p_value=float(claim_p_value(record.energy, record.count, record.resolution)),
        sentence="There is no noise at all." if found.high == 0 else f"The noise is {found}.",
        estimate=found.ratio,
    )


def step_noise(record: NoiseRecord) -> Check | None:
    """Test the step with the least noise, such as an empty batch that is released without any."""
    energies = np.asarray(record.step_energies)
    return _least(record, "step", energies, record.energies.size, str)


def leaf_noise(record: NoiseRecord) -> Check | None:
    """Test the leaf with the least noise."""
    energies = np.add.reduceat(record.energies, record.layout.starts)
    counts = record.num_steps * record.layout.sizes
    return _least(record, "leaf", energies, counts, lambda leaf: record.layout.names[leaf])


def coordinate_noise(record: NoiseRecord) -> Check | None:
    """Test the coordinate with the least noise: some may have been released as they are."""
    coordinate = record.layout.coordinate
    return _least(
        record, "coordinate", record.energies, record.num_steps, lambda index: str(coordinate(index))
    )


def _least(
    record: NoiseRecord, part: str, energies: FloatArray, counts: ArrayLike, name: Callable[[int], str]
) -> Check | None:
    """Test the part whose squares are least for their number, Bonferroni-corrected for all parts.

    A p-value is the larger of two: that of less than claimed (chi-square), and that of less than the others
    (beta). So what all parts lack is said once, by the variance.
    """
    if energies.size == 1:
        return None
    numbers = np.broadcast_to(np.asarray(counts, dtype=np.float64), energies.shape)
    rest = share_p_value(energies, numbers, record.energy, record.count, record.resolution)
    p_values = np.maximum(claim_p_value(energies, numbers, record.resolution), rest)
    least = int(np.argmin(p_values))
    ratio = float(np.sqrt(energies[least] / numbers[least]))
    return Check(
        name=f"{part}-noise",
        p_value=bonferroni(p_values[least], energies.size),
        sentence=f"The noise of {part} {name(least)} is {ratio:.2g} of the claim{_others(part, p_values)}.",
        estimate=ratio,
    )


def _others(part: str, p_values: FloatArray) -> str:
    """Return how many parts have too little, as the end of a sentence."""
    count = int(np.count_nonzero(p_values * p_values.size <= _SURE_P_VALUE))
    return f"; {count} of {p_values.size} such parts have too little ({part} by {part})" if count > 1 else ""


def noise_shape(record: NoiseRecord) -> Check | None:
    """Test cross ratios of two coordinates in two steps against those of normal noise (Kolmogorov-Smirnov).

    The scales of each coordinate and of each step are divided out. So neither the claimed nor an estimated
    variance enters.
    """
    ratios = _cross_ratios(record.sketches.rows.astype(np.float64))
    if ratios is None:
        return None
    levels = cross_ratio_cdf(ratios)
    mean = float(levels.mean()) if levels.size else 0.5
    tails = "longer" if mean > 0.5 else "shorter"
    return Check(
        name="noise-shape",
        p_value=uniform_p_value(levels, _RATIO_TOLERANCE * record.resolution),
        sentence=f"The noise is not normal: its tails are {tails} than those of normal noise.",
        estimate=mean,
    )


def cross_ratio_cdf(ratios: FloatArray) -> FloatArray:
    """Return the distribution function of absolute logarithms of cross ratios of normal numbers.

    A cross ratio is a product of two Cauchy numbers: its logarithm has the density r / sinh(r), up to a
    factor.
    """
    inverse = np.exp(-ratios)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = ratios * np.log(np.tanh(ratios / 2))
        rest = special.spence(1 - inverse) - special.spence(1 + inverse)
        values = 1 + 4 / math.pi**2 * (first - rest)
    return np.clip(np.where(ratios == 0, 0.0, np.where(np.isinf(ratios), 1.0, values)), 0.0, 1.0)


def _cross_ratios(rows: FloatArray) -> FloatArray | None:
    """Return absolute logarithms, of blocks that share no number.

    A coordinate or a step of zeros has none; nor have steps that are equal, for which there is another test.
    """
    if min(rows.shape) < 2:
        return None
    even = rows[: len(rows) // 2 * 2, : rows.shape[1] // 2 * 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.abs(even))
        across = logs[:, ::2] - logs[:, 1::2]
        ratios: FloatArray = np.abs(across[::2] - across[1::2]).ravel()[:_MAX_RATIOS]
    return ratios[ratios > 0]


def repeated_noise(record: NoiseRecord) -> Check | None:
    """Test the two steps whose signs agree, or differ, most often, of all pairs of steps: binomial."""
    rows = record.sketches.rows.astype(np.float64)
    num_rows, count = rows.shape
    if num_rows < 2 or count < 2:
        return None
    steps = record.sketches.steps
    first, second, counts = _most_alike(sure_signs(rows, record.resolution))
    p_value = bonferroni(float(sign_p_value(*counts, count)), num_rows * (num_rows - 1) / 2)
    estimate = float(sign_correlation(*counts))
    sentence = f"The noise of steps {steps[first]} and {steps[second]} has a correlation of {estimate:.2g}."
    return Check(
        name="repeated-noise",
        p_value=p_value,
        sentence=(_repetition(rows, steps) if p_value <= _SUSPICIOUS else None) or sentence,
        estimate=estimate,
    )


def _most_alike(signs: FloatArray) -> tuple[int, int, tuple[int, int]]:
    """Return the pair of rows with the smallest p-value, and how many of its signs agree and differ.

    The search counts a coordinate twice that is not sure in both rows. So it may miss the best pair by very
    little, which errs on the safe side: the p-value is that of the pair that it found.
    """
    single = signs.astype(np.float32)
    sure = np.abs(single).sum(axis=1)
    best, pair = -np.inf, (0, 1)
    for block, dots, is_earlier in pairwise_products(single):
        extremes = np.abs(dots) + sure[block][:, None] + sure[: dots.shape[1]]
        extremes[~is_earlier] = -np.inf
        later, earlier = np.unravel_index(int(extremes.argmax()), extremes.shape)
        if extremes[later, earlier] > best:
            best, pair = float(extremes[later, earlier]), (int(earlier), int(block[later]))
    first, second = signs[pair[0]], signs[pair[1]]
    agreeing, differing = (int(np.count_nonzero(first * second == sign)) for sign in (1, -1))
    return *pair, (agreeing, differing)


def _repetition(rows: FloatArray, steps: IntArray) -> str | None:
    """Describe rows that come again, as they are or as a multiple; None if no two are so alike."""
    lengths = np.linalg.norm(rows, axis=1)
    same, multiple = _earlier(rows, lengths)
    later = np.flatnonzero(multiple >= 0)
    if later.size == 0:
        return None
    if 2 * np.count_nonzero(same >= 0) >= later.size:  # of many multiples some have the same length by chance
        return _exact_repetition(steps, same)
    second = int(later[0])
    first = int(multiple[second])
    factor = rows[first] @ rows[second] / lengths[first] ** 2
    return (
        f"The noise of step {steps[second]} is {factor:.2g} times that of step {steps[first]}: "
        f"{later.size} of {len(steps)} steps have a multiple of the noise of an earlier one."
    )


def _earlier(rows: FloatArray, lengths: FloatArray) -> tuple[IntArray, IntArray]:
    """Return, for each row, the last one before it that is the same, and the last multiple of it; or -1."""
    units = np.divide(rows, lengths[:, None], out=np.zeros_like(rows), where=lengths[:, None] > 0)
    same, multiple = np.full(len(rows), -1), np.full(len(rows), -1)
    for block, cosines, is_earlier in pairwise_products(units.astype(np.float32)):
        shorter = np.minimum(lengths[block][:, None], lengths[: cosines.shape[1]])
        longer = np.maximum(lengths[block][:, None], lengths[: cosines.shape[1]])
        same[block] = _last(is_earlier & (cosines > _SAME) & (shorter > _SAME * longer))
        multiple[block] = _last(is_earlier & (np.abs(cosines) > _SAME))
    return same, multiple


def _last(mask: BoolArray) -> IntArray:
    """Return the last true column of each row, or -1."""
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.where(mask.any(axis=1), last, -1)


def _exact_repetition(steps: IntArray, same: IntArray) -> str:
    later = np.flatnonzero(same >= 0)
    gaps = steps[later] - steps[same[later]]
    period = int(gaps.min())
    if (gaps == period).all() and later.size == np.count_nonzero(steps >= period) > 1:
        return f"The noise repeats every {period} steps." if period > 1 else "Every step has the same noise."
    return (
        f"The noise of step {steps[same[later[0]]]} comes again in step {steps[later[0]]}: "
        f"{len(steps)} steps have {len(steps) - later.size} different vectors of noise."
    )


def lagged_correlation(record: NoiseRecord) -> Check | None:
    """Test how often signs agree in steps that are 1 to 16 apart, Bonferroni-corrected: binomial.

    A step is in two pairs of a distance, with an earlier and with a later one. Whether the signs of one pair
    agree says nothing about any other pair, so that all pairs are counted, and the p-value is exact.
    """
    rows, steps = record.sketches.rows.astype(np.float64), record.sketches.steps
    num_lags = min(_MAX_LAG, record.num_steps - 1)
    if num_lags < 1:
        return None
    signs = sure_signs(rows, record.resolution)
    found = []
    for lag in range(1, num_lags + 1):
        earlier = np.flatnonzero(np.isin(steps + lag, steps))
        products = signs[earlier] * signs[np.searchsorted(steps, steps[earlier] + lag)]
        counts = np.count_nonzero(products > 0), np.count_nonzero(products < 0)
        found.append((float(sign_p_value(*counts, products.size)), lag, float(sign_correlation(*counts))))
    p_value, lag, estimate = min(found)
    apart = "consecutive steps" if lag == 1 else f"steps {lag} apart"
    return Check(
        name="step-correlation",
        p_value=bonferroni(p_value, num_lags),
        sentence=f"The noise of {apart} has a correlation of {estimate:.2g}.",
        estimate=estimate,
    )


def leaf_correlation(record: NoiseRecord) -> Check | None:
    """Test the two leaves whose first coordinates agree in sign, or differ, most often: binomial.

    A generator that is seeded again for each leaf gives equal noise to leaves of equal shape, and often the
    same first numbers to others.
    """
    layout = record.layout
    if layout.compared.size < 2:
        return None
    widths = (layout.heads >= 0).sum(axis=1)
    upper = np.triu_indices(len(widths), 1)
    agreeing, differing = record.agreeing[upper], record.differing[upper]
    numbers = record.num_steps * np.minimum.outer(widths, widths)[upper]
    p_values, correlations = sign_p_value(agreeing, differing, numbers), sign_correlation(agreeing, differing)
    best = int(np.argmin(p_values))
    one, other = (layout.names[layout.compared[leaf[best]]] for leaf in upper)
    pairs = int(np.count_nonzero(np.abs(correlations) > _SAME))
    others = f"; {pairs} of {numbers.size} pairs of leaves are alike" if pairs > 1 else ""
    return Check(
        name="leaf-correlation",
        p_value=bonferroni(p_values[best], numbers.size),
        sentence=f"The noise of leaves {one} and {other} has a correlation of "
        f"{correlations[best]:.2g}{others}.",
        estimate=float(correlations[best]),
    )


def coordinate_correlation(record: NoiseRecord) -> Check | None:
    """Test sums of signs over each leaf in each step: too large if coordinates share noise, or a mean.

    The p-value is Chernoff's bound for squared sums of fair coins.
    """
    sums = record.num_steps * record.layout.sizes.size
    if record.count == sums:  # one coordinate in each leaf
        return None
    share = record.sum_energy / sums
    return Check(
        name="coordinate-correlation",
        p_value=sign_sum_p_value(record.sum_energy, sums),
        sentence="Coordinates share their noise, or it has a mean other than zero: squared sums of signs "
        f"over a leaf are {share:.3g} times what independent coordinates give.",
        estimate=share,
    )


NOISE_TESTS: tuple[Callable[[NoiseRecord], Check | None], ...] = (
    step_noise,
    leaf_noise,
    coordinate_noise,
    noise_shape,
    repeated_noise,
    lagged_correlation,
    leaf_correlation,
    coordinate_correlation,
)
"""All tests beside that of the variance, whose sentence needs a confidence."""

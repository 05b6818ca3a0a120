"""Whether there is as much noise as claimed.

Whether there is as much noise as claimed in each step, in each leaf, in each coordinate. Whether the noise is
normal. Whether the noise of a step is that of another step again. Which steps have the same noise, once it is
known that some do. Whether the noise of a step depends on that of the steps just before. Whether the noise of
one leaf is that of another. Whether the coordinates of a leaf go up and down together. All tests of the
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from dpaudit._types import ArrayLike, BoolArray, FloatArray, IntArray
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._tests import (
    Check,
    any_of,
    below_claim,
    below_rest,
    correlation,
    products,
    same_signs,
    sure_signs,
    swaying,
    uniform,
)


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


def amount(record: NoiseRecord, confidence: float) -> Amount:
    """How much noise there is."""
    tail = (1 - confidence) / 2
    low, high = (record.energy / float(stats.chi2.isf(q, record.count)) for q in (tail, 1 - tail))
    return Amount(
        ratio=math.sqrt(record.energy / record.count),
        low=math.sqrt(low),
        high=math.sqrt(high),
        confidence=confidence,
    )


def noise_variance(record: NoiseRecord, confidence: float) -> Check:
    """All noise together."""
    found = amount(record, confidence)
    return Check(
        name="noise-variance",
        p_value=float(below_claim(record.energy, record.count, record.resolution)),
        sentence="There is no noise at all." if found.high == 0 else f"The noise is {found}.",
        estimate=found.ratio,
    )


_SURELY = 1e-6  # how unlikely each part is that is counted as one without its noise


def step_noise(record: NoiseRecord) -> Check | None:
    """The step with the least noise, such as an empty batch that is released without any."""
    energies = np.asarray(record.step_energies)
    return _least(record, "step", energies, record.energies.size, str)


def leaf_noise(record: NoiseRecord) -> Check | None:
    """The leaf with the least noise."""
    energies = np.add.reduceat(record.energies, record.layout.starts)
    counts = record.num_steps * record.layout.sizes
    return _least(record, "leaf", energies, counts, lambda leaf: record.layout.names[leaf])


def coordinate_noise(record: NoiseRecord) -> Check | None:
    """The coordinate with the least noise: some may have been released as they are."""
    kept = record.layout.kept
    return _least(
        record,
        "coordinate",
        record.energies,
        record.num_steps,
        lambda place: str(place if kept is None else kept[place]),
    )


def _least(
    record: NoiseRecord, part: str, energies: FloatArray, counts: ArrayLike, called: Callable[[int], str]
) -> Check | None:
    """A part that has less than claimed and less than the others: what all lack is said once, elsewhere."""
    if energies.size == 1:
        return None
    numbers = np.broadcast_to(np.asarray(counts, dtype=np.float64), energies.shape)
    rest = below_rest(energies, numbers, record.energy, record.count, record.resolution)
    p_values = np.maximum(below_claim(energies, numbers, record.resolution), rest)
    least = int(np.argmin(p_values))
    ratio = float(np.sqrt(energies[least] / numbers[least]))
    return Check(
        name=f"{part}-noise",
        p_value=any_of(p_values[least], energies.size),
        sentence=f"The noise of {part} {called(least)} is {ratio:.2g} of the claim{_others(part, p_values)}.",
        estimate=ratio,
    )


def _others(part: str, p_values: FloatArray) -> str:
    """How many more have too little."""
    count = int(np.count_nonzero(p_values * p_values.size <= _SURELY))
    return f"; {count} of {p_values.size} such parts have too little ({part} by {part})" if count > 1 else ""


_MOST_SHAPE = 2**17
# What rounding can do to the distribution of cross ratios, in units of the resolution: 4.1 where each of
# the four numbers is moved to the worse side (simulated).
_TOLERANCE = 5.0


def noise_shape(record: NoiseRecord) -> Check | None:
    """Cross ratios of two coordinates in two steps: neither has to have the scale of the other.

    What each coordinate has more of, and what each step has more of, is divided out. So neither the claimed
    nor an estimated variance enters.
    """
    ratios = _cross_ratios(record.sketches.rows.astype(np.float64))
    if ratios is None:
        return None
    places = cross_ratio_chance(ratios)
    mean = float(places.mean()) if places.size else 0.5
    tails = "longer" if mean > 0.5 else "shorter"
    return Check(
        name="noise-shape",
        p_value=uniform(places, _TOLERANCE * record.resolution),
        sentence=f"The noise is not normal: its tails are {tails} than those of normal noise.",
        estimate=mean,
    )


def cross_ratio_chance(ratios: FloatArray) -> FloatArray:
    """How likely a cross ratio of normal numbers is to be nearer to 1, on a scale of absolute logarithms.

    It is a product of two Cauchy numbers, whose logarithm has the density r / sinh(r), up to a factor.
    """
    inverse = np.exp(-ratios)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = ratios * np.log(np.tanh(ratios / 2))
        rest = special.spence(1 - inverse) - special.spence(1 + inverse)
        chances = 1 + 4 / math.pi**2 * (first - rest)
    return np.clip(np.where(ratios == 0, 0.0, np.where(np.isinf(ratios), 1.0, chances)), 0.0, 1.0)


def _cross_ratios(rows: FloatArray) -> FloatArray | None:
    """Absolute logarithms, of blocks that share no number.

    A coordinate or a step of zeros has none; and steps that are equal, for which there is another test, have
    no shape of their own.
    """
    if min(rows.shape) < 2:
        return None
    even = rows[: len(rows) // 2 * 2, : rows.shape[1] // 2 * 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.abs(even))
        across = logs[:, ::2] - logs[:, 1::2]
        ratios: FloatArray = np.abs(across[::2] - across[1::2]).ravel()[:_MOST_SHAPE]
    return ratios[ratios > 0]


_SAME_ALIKE = 0.95  # the correlation from which on noise is called the same, if its length is too


def described(rows: FloatArray, steps: IntArray) -> str | None:
    """A sentence on the rows that come again, as they are or as a multiple; None if no two are so alike."""
    lengths = np.linalg.norm(rows, axis=1)
    same, multiple = _earlier(rows, lengths)
    later = np.flatnonzero(multiple >= 0)
    if later.size == 0:
        return None
    if 2 * np.count_nonzero(same >= 0) >= later.size:  # of many multiples some have the same length by chance
        return _of_same(steps, same)
    second = int(later[0])
    first = int(multiple[second])
    factor = rows[first] @ rows[second] / lengths[first] ** 2
    return (
        f"The noise of step {steps[second]} is {factor:.2g} times that of step {steps[first]}: "
        f"{later.size} of {len(steps)} steps have a multiple of the noise of an earlier one."
    )


def _earlier(rows: FloatArray, lengths: FloatArray) -> tuple[IntArray, IntArray]:
    """For each row the last one before it that is the same, and that is a multiple of it; -1 if none is."""
    units = np.divide(rows, lengths[:, None], out=np.zeros_like(rows), where=lengths[:, None] > 0)
    same, multiple = np.full(len(rows), -1), np.full(len(rows), -1)
    for block, cosines, is_earlier in products(units.astype(np.float32)):
        shorter = np.minimum(lengths[block][:, None], lengths[: cosines.shape[1]])
        longer = np.maximum(lengths[block][:, None], lengths[: cosines.shape[1]])
        same[block] = _last(is_earlier & (cosines > _SAME_ALIKE) & (shorter > _SAME_ALIKE * longer))
        multiple[block] = _last(is_earlier & (np.abs(cosines) > _SAME_ALIKE))
    return same, multiple


def _last(mask: BoolArray) -> IntArray:
    """The last true place of each row, or -1."""
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.where(mask.any(axis=1), last, -1)


def _of_same(steps: IntArray, same: IntArray) -> str:
    later = np.flatnonzero(same >= 0)
    gaps = steps[later] - steps[same[later]]
    period = int(gaps.min())
    if (gaps == period).all() and later.size == np.count_nonzero(steps >= period) > 1:
        return f"The noise repeats every {period} steps." if period > 1 else "Every step has the same noise."
    return (
        f"The noise of step {steps[same[later[0]]]} comes again in step {steps[later[0]]}: "
        f"{len(steps)} steps have {len(steps) - later.size} different vectors of noise."
    )


_SMALL = 0.05  # p-values above it are no finding at any level that is used: nothing to look at more closely


def repeated_noise(record: NoiseRecord) -> Check | None:
    """The two steps whose signs agree, or differ, most often, of all pairs of steps."""
    rows = record.sketches.rows.astype(np.float64)
    num_rows, count = rows.shape
    if num_rows < 2 or count < 2:
        return None
    steps = record.sketches.steps
    first, second, counts = _most_alike(sure_signs(rows, record.resolution))
    p_value = any_of(float(same_signs(*counts, count)), num_rows * (num_rows - 1) / 2)
    estimate = float(correlation(*counts))
    sentence = f"The noise of steps {steps[first]} and {steps[second]} has a correlation of {estimate:.2g}."
    return Check(
        name="repeated-noise",
        p_value=p_value,
        sentence=(described(rows, steps) if p_value <= _SMALL else None) or sentence,
        estimate=estimate,
    )


def _most_alike(signs: FloatArray) -> tuple[int, int, tuple[int, int]]:
    """The pair of rows with the smallest p-value; how many of its signs agree, how many differ.

    The search counts a place twice that is not sure in both rows. So it may miss the best pair by very
    little, which errs on the safe side: the p-value is that of the pair that it found.
    """
    single = signs.astype(np.float32)
    sure = np.abs(single).sum(axis=1)
    best, pair = -np.inf, (0, 1)
    for block, dots, is_earlier in products(single):
        extremes = np.abs(dots) + sure[block][:, None] + sure[: dots.shape[1]]
        extremes[~is_earlier] = -np.inf
        later, earlier = np.unravel_index(int(extremes.argmax()), extremes.shape)
        if extremes[later, earlier] > best:
            best, pair = float(extremes[later, earlier]), (int(earlier), int(block[later]))
    first, second = signs[pair[0]], signs[pair[1]]
    agreeing, differing = (int(np.count_nonzero(first * second == sign)) for sign in (1, -1))
    return *pair, (agreeing, differing)


_MOST_LAGS = 16


def step_correlation(record: NoiseRecord) -> Check | None:
    """The signs of steps so many apart, for one up to 16.

    A step is in two pairs of a distance, with an earlier and with a later one. Whether the signs of one pair
    agree says nothing about any other pair, so that all pairs are counted, and the p-value is exact.
    """
    rows, steps = record.sketches.rows.astype(np.float64), record.sketches.steps
    num_lags = min(_MOST_LAGS, record.num_steps - 1)
    if num_lags < 1:
        return None
    signs = sure_signs(rows, record.resolution)
    found = []
    for lag in range(1, num_lags + 1):
        earlier = np.flatnonzero(np.isin(steps + lag, steps))
        products = signs[earlier] * signs[np.searchsorted(steps, steps[earlier] + lag)]
        counts = np.count_nonzero(products > 0), np.count_nonzero(products < 0)
        found.append((float(same_signs(*counts, products.size)), lag, float(correlation(*counts))))
    p_value, lag, estimate = min(found)
    apart = "consecutive steps" if lag == 1 else f"steps {lag} apart"
    return Check(
        name="step-correlation",
        p_value=any_of(p_value, num_lags),
        sentence=f"The noise of {apart} has a correlation of {estimate:.2g}.",
        estimate=estimate,
    )


_SAME_LEAVES = 0.95


def leaf_correlation(record: NoiseRecord) -> Check | None:
    """The two leaves whose first coordinates have the same signs most often, over all steps.

    A generator that starts anew for each leaf gives equal noise to leaves of equal shape, and often the same
    first numbers to others.
    """
    layout = record.layout
    if layout.compared.size < 2:
        return None
    widths = (layout.heads >= 0).sum(axis=1)
    upper = np.triu_indices(len(widths), 1)
    agreeing, differing = record.agreeing[upper], record.differing[upper]
    numbers = record.num_steps * np.minimum.outer(widths, widths)[upper]
    p_values, correlations = same_signs(agreeing, differing, numbers), correlation(agreeing, differing)
    place = int(np.argmin(p_values))
    one, other = (layout.names[layout.compared[leaf[place]]] for leaf in upper)
    pairs = int(np.count_nonzero(np.abs(correlations) > _SAME_LEAVES))
    more = f"; {pairs} of {numbers.size} pairs of leaves are alike" if pairs > 1 else ""
    return Check(
        name="leaf-correlation",
        p_value=any_of(p_values[place], numbers.size),
        sentence=f"The noise of leaves {one} and {other} has a correlation of "
        f"{correlations[place]:.2g}{more}.",
        estimate=float(correlations[place]),
    )


def coordinate_correlation(record: NoiseRecord) -> Check | None:
    """Sums of signs over each leaf in each step: too large if coordinates share their noise, or a mean."""
    sums = record.num_steps * record.layout.sizes.size
    if record.count == sums:  # a coordinate a leaf
        return None
    share = record.sum_energy / sums
    return Check(
        name="coordinate-correlation",
        p_value=swaying(record.sum_energy, sums),
        sentence="Coordinates share their noise, or it has a mean other than zero: squared sums of signs "
        f"over a leaf are {share:.3g} times what independent coordinates give.",
        estimate=share,
    )


_OTHERS = (
    step_noise,
    leaf_noise,
    coordinate_noise,
    noise_shape,
    repeated_noise,
    step_correlation,
    leaf_correlation,
    coordinate_correlation,
)


def noise_checks(record: NoiseRecord, confidence: float) -> list[Check]:
    """Those that so many steps, leaves and coordinates allow; none is left out for its result."""
    if record.num_steps == 0:
        return []
    found = [noise_variance(record, confidence), *(check(record) for check in _OTHERS)]
    return [check for check in found if check is not None]

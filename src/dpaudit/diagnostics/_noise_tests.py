"""Tests of the noise of a training run: its amount and its correlation.

Further chapters test its distribution (``_distribution_tests``), the values it takes (``_lattice_tests``),
its dependence on itself (``_dependence_tests``) and on the data (``_data_tests``).

Under each null hypothesis, all noise is normal, independent, and at least as large as claimed. Each test
names its null distribution; those shared by several tests are in ``_p_values``. To add a test, write a
function that takes a ``NoiseRecord`` and returns a ``Check``, or None if there is too little to test.
Declare its finding in ``_findings``, and add it to ``NOISE_TESTS`` below or to the list of its chapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy

from dpaudit._types import ArrayLike, FloatArray
from dpaudit.diagnostics._data_tests import DATA_TESTS, noise_by_sum
from dpaudit.diagnostics._dependence_tests import (
    DEPENDENCE_TESTS,
    MAX_LAG,
    SAME_NOISE,
    common_noise,
    low_rank_noise,
    repeated_noise,
    segments,
    shifted_noise,
)
from dpaudit.diagnostics._distribution_tests import REGULARITY_TESTS, SHAPE_TESTS, balanced_steps
from dpaudit.diagnostics._lattice_tests import LATTICE_TESTS
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import (
    Z_CERTAIN,
    Amount,
    Check,
    bonferroni,
    claim_p_value,
    share_p_value,
    sign_correlation,
    sign_p_value,
    sign_sum_p_value,
)


def noise_checks(record: NoiseRecord, confidence: float) -> list[Check]:
    """Run all tests for which there are enough steps, leaves and coordinates."""
    if record.num_steps == 0:
        return []
    checks = [noise_variance(record, confidence), *(test(record) for test in NOISE_TESTS)]
    return [check for check in checks if check is not None]


def noise_amount(record: NoiseRecord, confidence: float) -> Amount:
    """Return the amount of noise with its chi-square confidence interval."""
    tail = (1 - confidence) / 2
    low, high = (record.energy / float(scipy.stats.chi2.isf(q, record.count)) for q in (tail, 1 - tail))
    return Amount(
        ratio=math.sqrt(record.energy / record.count),
        low=math.sqrt(low),
        high=math.sqrt(high),
        confidence=confidence,
    )


def noise_variance(record: NoiseRecord, confidence: float) -> Check:
    """Test the sum of all squares, which is chi-square distributed if the noise is as claimed."""
    amount = noise_amount(record, confidence)
    return Check(
        name="noise-variance",
        p_value=float(claim_p_value(record.energy, record.count, record.resolution)),
        sentence="There is no noise at all." if amount.high == 0 else f"The noise is {amount}.",
        estimate=amount.ratio,
        cause=_trend(record),
    )


def step_noise(record: NoiseRecord) -> Check | None:
    """Test the step with the least noise, such as an empty batch that is released without noise."""
    energies, size = np.asarray(record.step_energies), record.energies.size

    def cause(step: int) -> str:
        some_noise = 0.1  # of the claim: a step with less may have none
        has_noise = energies[step] > some_noise**2 * size
        varying = (
            "is the standard deviation of the noise computed from the batch, or changed from step to step in "
            "another way?"
        )
        return _trend(record) or (varying if has_noise else "")

    return _least(record, "step-noise", energies, size, str, cause=cause)


def _trend(record: NoiseRecord) -> str:
    """Describe how the noise changes over the steps, as a likely cause; empty if it does not clearly."""
    energies = np.asarray(record.step_energies)
    size = max(energies.size // 10, 3)
    ends = energies[:size], energies[-size:]
    first, last = (float(np.sqrt(end.mean() / record.energies.size)) for end in ends)
    min_trend = 30  # steps
    trend = 0.05  # smallest relative change of the noise between the first and the last tenth of the steps
    if energies.size < min_trend or min(first, last) == 0 or abs(last - first) < trend * max(first, last):
        return ""
    order = scipy.stats.spearmanr(np.arange(energies.size), energies)
    steady = 0.5  # smallest rank correlation of noise and time
    if abs(order.statistic) < steady:  # single steps, or some of them, lack noise
        return ""
    change = "shrinks" if last < first else "grows"
    return (
        f"the noise {change} during the run, from {first:.2g} to {last:.2g} of the claimed level: is the "
        "noise multiplier changed by a scheduler, or does the noise depend on something that changes?"
    )


def leaf_noise(record: NoiseRecord) -> Check | None:
    """Test the leaf with the least noise."""
    energies = np.add.reduceat(record.energies, record.layout.starts)
    counts = record.num_steps * record.layout.sizes
    names = record.layout.names

    def cause(leaf: int) -> str:
        is_named = names[leaf] != str(leaf)
        return f"is {names[leaf]} skipped when noise is added, or scaled separately?" if is_named else ""

    return _least(record, "leaf-noise", energies, counts, names.__getitem__, cause=cause)


def coordinate_noise(record: NoiseRecord) -> Check | None:
    """Test the coordinate with the least noise: some coordinates may be released without noise."""
    coordinate = record.layout.coordinate
    return _least(
        record, "coordinate-noise", record.energies, record.num_steps, lambda index: str(coordinate(index))
    )


def _least(
    record: NoiseRecord,
    name: str,
    energies: FloatArray,
    counts: ArrayLike,
    label: Callable[[int], str],
    *,
    cause: Callable[[int], str] = lambda _: "",
) -> Check | None:
    """Test the part with the least noise, Bonferroni-corrected for all parts.

    Each p-value is the larger of two: for less noise than claimed (chi-square), and for less noise than in
    the other parts (beta). Noise that is missing everywhere is thus reported once, by the variance test.
    """
    if energies.size == 1:
        return None
    numbers = np.broadcast_to(np.asarray(counts, dtype=np.float64), energies.shape)
    rest = share_p_value(energies, numbers, record.energy, record.count, record.resolution)
    p_values = np.maximum(claim_p_value(energies, numbers, record.resolution), rest)
    least = int(np.argmin(p_values))
    ratio, unit = float(np.sqrt(energies[least] / numbers[least])), name.removesuffix("-noise")
    return Check(
        name=name,
        p_value=bonferroni(p_values[least], energies.size),
        sentence=f"The noise of {unit} {label(least)} is {ratio:.2g} of the claimed level"
        f"{_others(unit, p_values)}.",
        estimate=ratio,
        cause=cause(least),
    )


def _others(unit: str, p_values: FloatArray) -> str:
    """Return how many steps, leaves or coordinates have too little noise, as the end of a sentence."""
    sure_p_value = 1e-6  # corrected p-value below which a part counts as lacking noise
    count = int(np.count_nonzero(p_values * p_values.size <= sure_p_value))
    units = "leaves" if unit == "leaf" else f"{unit}s"
    return f"; {count} of {p_values.size} {units} have too little noise" if count > 1 else ""


def lagged_correlation(record: NoiseRecord) -> Check | None:
    """Test how often signs agree in steps that are 1 to 16 apart, Bonferroni-corrected: binomial.

    A step belongs to two pairs of the same distance, with an earlier and with a later step. Whether the signs
    of one pair agree is independent of all other pairs, so all pairs are counted and the p-value is exact.
    """
    num_lags = min(MAX_LAG, record.num_steps - 1)
    if num_lags < 1:
        return None
    runs = [record.signs[run] for run in segments(record.steps)]
    sure_runs = [run != 0 for run in runs]
    results = []
    for lag in range(1, num_lags + 1):
        total = sum(float(np.vdot(run[:-lag], run[lag:])) for run in runs)
        sure = sum(float(np.count_nonzero(run[:-lag] & run[lag:])) for run in sure_runs)
        counts = (sure + total) / 2, (sure - total) / 2
        size = sum(run[lag:].size for run in runs)
        results.append((float(sign_p_value(*counts, size)), lag, float(sign_correlation(*counts))))
    p_value, lag, estimate = min(results)
    apart = "consecutive steps" if lag == 1 else f"steps {lag} apart"
    return Check(
        name="step-correlation",
        p_value=bonferroni(p_value, num_lags),
        sentence=f"The noise of {apart} has a correlation of {estimate:.2g}.",
        estimate=estimate,
    )


def leaf_correlation(record: NoiseRecord) -> Check | None:
    """Test the pair of leaves whose leading coordinates agree in sign, or differ, most often: binomial.

    A generator that is reseeded for each leaf gives equal noise to leaves of equal shape, and often the same
    first numbers to others.
    """
    layout = record.layout
    if layout.compared.size < 2:
        return None
    widths = (layout.heads >= 0).sum(axis=1)
    upper = np.triu_indices(len(widths), 1)
    agreeing, differing = record.agreeing[upper], record.differing[upper]
    numbers = record.num_signed * np.minimum.outer(widths, widths)[upper]
    p_values, correlations = sign_p_value(agreeing, differing, numbers), sign_correlation(agreeing, differing)
    best = int(np.argmin(p_values))
    first, second = (layout.names[layout.compared[leaf[best]]] for leaf in upper)
    pairs = int(np.count_nonzero(np.abs(correlations) > SAME_NOISE))
    others = (
        f"; {pairs} of {numbers.size} pairs of leaves are almost perfectly correlated" if pairs > 1 else ""
    )
    return Check(
        name="leaf-correlation",
        p_value=bonferroni(p_values[best], numbers.size),
        sentence=f"The noise of leaves {first} and {second} has a correlation of "
        f"{correlations[best]:.2g}{others}.",
        estimate=float(correlations[best]),
    )


def coordinate_correlation(record: NoiseRecord) -> Check | None:
    """Test sums of signs over each leaf in each step: too large if coordinates share noise or a mean.

    The p-value is Chernoff's bound for squared sums of fair coins.
    """
    if record.energies.size == record.layout.sizes.size:  # one coordinate in each leaf
        return None
    sums = record.num_signed * record.layout.sizes.size
    share = record.sum_energy / sums
    return Check(
        name="coordinate-correlation",
        p_value=sign_sum_p_value(record.sum_energy, sums),
        sentence="Coordinates share noise, or its mean is nonzero: squared sums of signs "
        f"over a leaf are {share:.3g} times those of independent coordinates.",
        estimate=share,
        cause=_cause_of_mean(record.rows.mean(axis=1, dtype=np.float64)),
    )


def _cause_of_mean(means: FloatArray) -> str:
    """Return the cause if the means of all steps are off in the same direction; empty if they are not."""
    mean, error = float(means.mean()), float(means.std()) / math.sqrt(means.size)
    least, most = 0.02, 10.0  # means of the noise that are a cause
    if not least <= abs(mean) <= most or abs(mean) < Z_CERTAIN * error:
        return ""
    return (
        f"the mean of the noise is {mean:.3g} claimed standard deviations instead of 0: is it drawn from "
        "another distribution, such as uniform numbers, or is the same vector added in every step?"
    )


PUBLIC_TESTS: dict[str, Callable[[NoiseRecord], Check | None]] = {
    "noise-by-sum": noise_by_sum,
    "step-correlation": lagged_correlation,
    "shifted-noise": shifted_noise,
    "low-rank-noise": low_rank_noise,
    "common-noise": common_noise,
    "repeated-noise": repeated_noise,
    "balanced-noise": balanced_steps,
}
"""Tests that a public part of the release may fail, such as weight decay."""

NOISE_TESTS: tuple[Callable[[NoiseRecord], Check | None], ...] = (
    step_noise,
    leaf_noise,
    coordinate_noise,
    repeated_noise,
    lagged_correlation,
    leaf_correlation,
    coordinate_correlation,
    *SHAPE_TESTS,
    *LATTICE_TESTS,
    *DEPENDENCE_TESTS,
    *REGULARITY_TESTS,
    *DATA_TESTS,
)
"""All tests except that of the variance, whose sentence needs a confidence."""

"""Tests of the noise of a training run: its amount, its correlation, and what of it is no leak.

Further chapters test its distribution (``_distribution_tests``), its dependence on itself
(``_dependence_tests``) and on the data (``_data_tests``).

Under each null hypothesis, all noise is normal, independent, and at least as large as claimed. Each test
names its null distribution; those shared by several tests are in ``_p_values``. To add a test, write a
function that takes a ``NoiseRecord`` and returns a ``Check``, or None if there is too little to test.
Declare its finding in ``_findings``, and add it to ``NOISE_TESTS`` below or to the list of its chapter.

What stays for many steps may be public, and what follows from the weights is. Weight decay that is written
into the gradient after the noise is an example. Weights are the first ones minus a sum of earlier releases,
so the decay depends on earlier sums, but reveals nothing new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import scipy

from dpaudit import _validate
from dpaudit._types import ArrayLike, FloatArray
from dpaudit.diagnostics._data_tests import DATA_TESTS, noise_by_sum
from dpaudit.diagnostics._dependence_tests import (
    DEPENDENCE_TESTS,
    MAX_LAG,
    SAME_NOISE,
    common_noise,
    low_rank_noise,
    repeated_noise,
    scaled_noise,
    segments,
    shifted_noise,
)
from dpaudit.diagnostics._diagnosis import CORRELATED_BY_DESIGN
from dpaudit.diagnostics._distribution_tests import REGULARITY_TESTS, SHAPE_TESTS, balanced_steps
from dpaudit.diagnostics._noise_record import FEW_COORDINATES, NoiseRecord
from dpaudit.diagnostics._p_values import (
    MAX_P_VALUE_OF_FINDING,
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

_MENTIONED_P_VALUE = 1e-4  # below which what is explained, or stays for many steps, is mentioned
_DRIFT_BLOCK = 32  # steps


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
        sentence="There is no noise at all."
        if amount.high == 0
        else f"The noise is {_validate.percent(amount.ratio, 2)} of the claimed level.",
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
        f"the noise {change} during the run, from {_validate.percent(first, 2)} to "
        f"{_validate.percent(last, 2)} of the claimed level: is the noise multiplier changed "
        "by a scheduler, or does the noise depend on something that changes?"
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
        sentence=f"The noise of {unit} {label(least)} is {_validate.percent(ratio, 2)} of the claimed level"
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
    agreeing, differing = (pairs[upper] for pairs in record.sign_pairs)
    numbers = len(record.rows) * np.minimum.outer(widths, widths)[upper]
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
    sums = len(record.rows) * record.layout.sizes.size
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


def discount_weight_decay(
    record: NoiseRecord,
    checks: Sequence[Check],
) -> tuple[list[Check], list[str]]:
    """Return the checks with the largest of their p-values with and without each penalty of the weights.

    Only tests that a public part may fail are repeated, and only if they would have a finding. The largest
    p-value holds for correct noise whatever the others are. The second list has a note if a finding is
    explained.
    """
    suspects = [
        check for check in checks if check.name in PUBLIC_TESTS and check.p_value <= MAX_P_VALUE_OF_FINDING
    ]
    weights = record.weights if suspects else None
    if weights is None:
        return list(checks), []
    decay = weights.astype(np.float64)
    rests = [
        _subtract_penalty(decay, record),
        _subtract_penalty(decay - decay[0], record),
        _subtract_penalty(np.sign(decay), record, jumps=True),
    ]
    results, is_explained = [], False
    for check in checks:
        repeats = [PUBLIC_TESTS[check.name](rest) for rest in rests] if check in suspects else []
        p_value = max([check.p_value, *(again.p_value for again in repeats if again is not None)])
        is_explained |= check.p_value <= _MENTIONED_P_VALUE < MAX_P_VALUE_OF_FINDING < p_value
        results.append(replace(check, p_value=p_value))
    note = (
        "The release contains a multiple of the weights besides the sum and the noise, as with weight decay "
        "that is added after the noise: if it is nothing else, it is not a leak, because weights follow from "
        "earlier releases."
    )
    return results, [note] if is_explained else []


def _subtract_penalty(penalty: FloatArray, record: NoiseRecord, *, jumps: bool = False) -> NoiseRecord:
    """Return the record without the multiple of a penalty that is in the noise.

    Penalties are weight decay, the same towards the first weights, and L1, the only one whose gradient jumps.

    The multiple is the same in all steps, but may differ between leaves, and is positive: weights are drawn
    to where the penalty is small. A gradient is no such multiple: it draws weights to where examples have
    small losses. Decay changes slowly. Noise that is subtracted in the next step is a multiple of the weights
    as well, but changes as fast as the noise.
    """
    rows, sizes = record.rows.astype(np.float64), record.layout.sketch_sizes
    changes = np.diff(penalty, axis=0)[np.diff(record.steps) == 1]
    energies = penalty * rows, penalty**2, changes**2, rows**2
    product, squared, changed, noise = (_by_leaf(values.sum(axis=0), sizes) for values in energies)
    factors = np.maximum(product, 0.0) / np.maximum(squared, np.finfo(np.float64).tiny)
    max_penalty_change = 0.2  # from one step to the next, in noise
    factors[(factors**2 * changed > max_penalty_change**2 * noise) & (not jumps)] = 0.0
    rest = (rows - penalty * np.repeat(factors, sizes)).astype(np.float32)
    return record.with_rows(rest, few_rows=rest[:, :FEW_COORDINATES], few_steps=record.steps)


def _by_leaf(values: FloatArray, sizes: Sequence[int]) -> FloatArray:
    """Return the sum of each leaf; leaves of which few coordinates are kept share theirs."""
    starts, counts = np.cumsum([0, *sizes])[:-1], np.asarray(sizes)
    sums = np.array([values[start : start + size].sum() for start, size in zip(starts, sizes, strict=True)])
    is_small = counts < 16  # too few for a decay of their own
    sums[is_small] = sums[is_small].sum()
    return sums


def drift_note(record: NoiseRecord) -> str | None:
    """Return a question if the noise has a mean that stays for many steps, which need not be a leak."""
    num_rows, width = record.rows.shape
    if num_rows < 2 * _DRIFT_BLOCK:
        return None
    rows = scaled_noise(record)
    num_blocks = num_rows // _DRIFT_BLOCK
    blocks = rows[: num_blocks * _DRIFT_BLOCK].reshape(num_blocks, _DRIFT_BLOCK, width)
    p_values = [
        _mean_p_value(rows[None], record.resolution),
        _mean_p_value(blocks, record.resolution),
    ]
    if bonferroni(min(p_values), len(p_values)) > _MENTIONED_P_VALUE:
        return None
    return (
        "The release contains something besides the sum and the noise that stays for many steps: does it "
        "depend on the data? If not, as with weight decay, it is not a leak: subtract it first."
    )


def _mean_p_value(blocks: FloatArray, resolution: float) -> float:
    """Return the p-value of an F test of the squared means of blocks (blocks x steps x coordinates)."""
    num_blocks, num_rows, width = blocks.shape
    means = np.abs(blocks.mean(axis=1))
    within = float(blocks.var(axis=1, ddof=1).mean())
    between = num_rows * float((np.maximum(means - resolution, 0.0) ** 2).mean())
    freedom = num_blocks * width
    return float(scipy.stats.f.sf(between / max(within, 1e-300), freedom, freedom * (num_rows - 1)))


def with_cause_of_correlation(record: NoiseRecord, checks: Sequence[Check]) -> list[Check]:
    """Return the checks; if steps are correlated on purpose, as in DP-FTRL, the cause says so."""
    return [
        replace(check, cause=CORRELATED_BY_DESIGN)
        if check.name == "step-correlation"
        and check.p_value <= MAX_P_VALUE_OF_FINDING
        and _is_filtered(record)
        else check
        for check in checks
    ]


def _is_filtered(record: NoiseRecord) -> bool:
    """Return whether the noise is white noise of the claimed level, passed through a causal filter.

    The noise of a step is predicted from that of earlier steps, by weights that are fitted to every second
    coordinate and applied to the others. What remains must be as large as claimed, hardly correlated between
    steps, and unrelated to the sums. Noise that is reused or subtracted at the expense of new noise leaves
    less than claimed.
    """
    rows = record.rows.astype(np.float64)
    lags = min(MAX_LAG, len(rows) // 4)  # a filter is fitted to 4 steps a lag
    if lags == 0 or rows.shape[1] < 2:  # one coordinate to fit, one to test
        return False
    totals = np.cumsum(rows, axis=0)
    earlier = np.stack([*(rows[lags - lag : -lag] for lag in range(1, lags + 1)), totals[lags - 1 : -1]])
    fitted = earlier[:, :, ::2].reshape(lags + 1, -1).T
    weights = np.linalg.lstsq(fitted, rows[lags:, ::2].reshape(-1), rcond=None)[0]
    new = rows[:, 1::2].copy()
    new[lags:] -= np.tensordot(weights, earlier[:, :, 1::2], axes=1)
    min_new_variance = 0.95  # of the claimed variance: 4 % is the standard error of 1,200 numbers
    if float(np.square(new[lags:]).mean()) < min_new_variance:
        return False
    max_correlation_left = 0.5  # which a filter of 16 steps removes but for its own errors
    if _largest_correlation(new[lags:], lags) > max_correlation_left * _largest_correlation(rows, lags):
        return False
    sums = {"sums": record.sums, "example_sums": record.example_sums}
    halves = {name: None if rows is None else rows[:, 1::2] for name, rows in sums.items()}
    by_sum = noise_by_sum(record.with_rows(new.astype(np.float32), grid=record.grid, **halves))
    return by_sum is None or by_sum.p_value > MAX_P_VALUE_OF_FINDING


def _largest_correlation(rows: FloatArray, lags: int) -> float:
    """Return the largest correlation of steps that are at most this far apart."""
    products = [abs(float((rows[lag:] * rows[:-lag]).mean())) for lag in range(1, lags + 1)]
    return max(products) / float(np.square(rows).mean())


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
    *DEPENDENCE_TESTS,
    *REGULARITY_TESTS,
    *DATA_TESTS,
)
"""All tests except that of the variance, whose sentence needs a confidence."""

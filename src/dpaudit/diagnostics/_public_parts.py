"""Parts of the noise that are no leak: what is public, and what is correlated on purpose.

What stays for many steps may be public, and what follows from the weights is. Weight decay that is written
into the gradient after the noise is an example. Weights are the first ones minus a sum of earlier releases,
so the decay depends on earlier sums, but reveals nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import scipy

from dpaudit._types import FloatArray
from dpaudit.diagnostics._data_tests import noise_by_sum
from dpaudit.diagnostics._dependence_tests import MAX_LAG, scaled_noise
from dpaudit.diagnostics._diagnosis import CORRELATED_BY_DESIGN
from dpaudit.diagnostics._noise_record import FEW_COORDINATES, NoiseRecord
from dpaudit.diagnostics._p_values import MAX_P_VALUE_OF_FINDING, Check, bonferroni

_MENTIONED_P_VALUE = 1e-4  # below which what is explained, or stays for many steps, is mentioned
_DRIFT_BLOCK = 32  # steps


def discount_weight_decay(
    record: NoiseRecord,
    checks: Sequence[Check],
    tests: Mapping[str, Callable[[NoiseRecord], Check | None]],
) -> tuple[list[Check], list[str]]:
    """Return the checks with the largest of their p-values with and without each penalty of the weights.

    Only ``tests`` are repeated, and only if they would have a finding. The largest p-value holds for correct
    noise whatever the others are. The second list has a note if a finding is explained.
    """
    suspects = [check for check in checks if check.name in tests and check.p_value <= MAX_P_VALUE_OF_FINDING]
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
        repeats = [tests[check.name](rest) for rest in rests] if check in suspects else []
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

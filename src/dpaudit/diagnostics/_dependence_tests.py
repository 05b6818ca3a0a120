"""Tests of noise that is not independent: repeated, shared at an offset, of low rank, or with a common part.

Signs of independent symmetric noise are fair coins whatever its scales, so most of these p-values are exact
or follow from inequalities that hold for any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import fft, linalg

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import (
    MAX_P_VALUE_OF_FINDING,
    RESOLUTION,
    Check,
    bonferroni,
    pairwise_products,
    sign_correlation,
    sign_p_value,
    sure_signs,
)

SingleArray: TypeAlias = npt.NDArray[np.float32]

MAX_LAG = 16  # largest distance of two steps that are compared
_FFT_ROWS, _FREQUENCIES = 256, 128  # that are transformed or multiplied together
_SHARES = (2.0, 1.0, 0.5, 1 / 16, 1 / 256)  # of the most sensitive slope
SAME_NOISE = 0.95  # correlation above which noise counts as the same, if its norm is the same as well


def segments(steps: IntArray) -> list[slice]:
    """Return the runs of consecutive steps: one, or two if those in between were not kept."""
    gaps = np.flatnonzero(np.diff(steps) != 1) + 1
    edges = [0, *gaps.tolist(), len(steps)]
    return [slice(first, last) for first, last in pairwise(edges)]


def repeated_noise(record: NoiseRecord) -> Check | None:
    """Test the pair of steps whose signs agree, or differ, most often: binomial."""
    if min(record.rows.shape) < 2:
        return None
    blocks = [(record.rows, record.signs, record.steps)]
    if len(record.few_steps) > len(record.rows):  # noise that is equal needs few coordinates
        few = record.few_rows
        blocks.append((few, sure_signs(few, record.resolution), record.few_steps))
    return min((_repeated(*block, len(blocks)) for block in blocks), key=lambda found: found.p_value)


def _repeated(rows: SingleArray, signs: SingleArray, steps: IntArray, num_tests: int) -> Check:
    """Return the test of these steps, corrected for all pairs and for the number of tests."""
    num_rows, count = signs.shape
    first, second, counts = _most_alike(signs)
    p_value = bonferroni(float(sign_p_value(*counts, count)), num_tests * num_rows * (num_rows - 1) / 2)
    estimate = float(sign_correlation(*counts))
    sentence = f"The noise of steps {steps[first]} and {steps[second]} has a correlation of {estimate:.2g}."
    return Check(
        name="repeated-noise",
        p_value=p_value,
        sentence=(_repetition(rows, steps) if p_value <= MAX_P_VALUE_OF_FINDING else None) or sentence,
        estimate=estimate,
    )


def _most_alike(signs: SingleArray) -> tuple[int, int, tuple[int, int]]:
    """Return the pair of rows with the smallest p-value, and how many of its signs agree and differ.

    The search counts a coordinate without a sure sign in either row twice, so it may narrowly miss the best
    pair. This is conservative: the p-value belongs to the pair found.
    """
    sure = np.abs(signs).sum(axis=1)
    best, pair = -np.inf, (0, 1)
    for block, dots, is_earlier in pairwise_products(signs):
        extremes = np.abs(dots, out=dots)
        extremes += sure[block][:, None]
        extremes += sure[: dots.shape[1]]
        extremes[~is_earlier] = -np.inf
        later, earlier = np.unravel_index(int(extremes.argmax()), extremes.shape)
        if extremes[later, earlier] > best:
            best, pair = float(extremes[later, earlier]), (int(earlier), int(block[later]))
    first, second = signs[pair[0]], signs[pair[1]]
    agreeing, differing = (int(np.count_nonzero(first * second == sign)) for sign in (1, -1))
    return *pair, (agreeing, differing)


def _repetition(noise: SingleArray, steps: IntArray) -> str | None:
    """Describe rows that repeat, exactly or as a multiple; None if no two rows are that similar."""
    rows = noise.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1)
    same, multiple = _earlier(rows, lengths)
    later = np.flatnonzero(multiple >= 0)
    if later.size == 0:
        return None
    if 2 * np.count_nonzero(same >= 0) >= later.size:  # a few multiples may have equal norms by accident
        return _exact_repetition(steps, same)
    second = int(later[0])
    first = int(multiple[second])
    factor = rows[first] @ rows[second] / lengths[first] ** 2
    return (
        f"The noise of step {steps[second]} is {factor:.2g} times that of step {steps[first]}: "
        f"in {later.size} of {len(steps)} steps, the noise is a multiple of that of an earlier step."
    )


def _earlier(rows: FloatArray, lengths: FloatArray) -> tuple[IntArray, IntArray]:
    """Return, for each row, the last earlier row that is the same, and the last that is a multiple; or -1."""
    units = np.divide(rows, lengths[:, None], out=np.zeros_like(rows), where=lengths[:, None] > 0)
    same, multiple = np.full(len(rows), -1), np.full(len(rows), -1)
    for block, cosines, is_earlier in pairwise_products(units.astype(np.float32)):
        shorter = np.minimum(lengths[block][:, None], lengths[: cosines.shape[1]])
        longer = np.maximum(lengths[block][:, None], lengths[: cosines.shape[1]])
        same[block] = _last(is_earlier & (cosines > SAME_NOISE) & (shorter > SAME_NOISE * longer))
        multiple[block] = _last(is_earlier & (np.abs(cosines) > SAME_NOISE))
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
        f"Step {steps[later[0]]} repeats the noise of step {steps[same[later[0]]]}: "
        f"{len(steps)} steps use only {len(steps) - later.size} distinct noise vectors."
    )


def shifted_noise(record: NoiseRecord) -> Check | None:
    """Test how often signs agree at each offset of coordinates, in steps 0 to 16 apart: binomial.

    Pairs with the same offset and distance form paths, on which whether signs agree is independent. Offsets
    around the end of the vector count together with those inside it as well, as in rolled noise. Coordinates
    without offset are left to the test of steps.
    """
    signs, steps = record.signs, record.steps
    width = signs.shape[1]
    if width < 2:
        return None
    fft_error = 4.0  # of a sum, in signs
    unsure = fft_error + 2.0 * np.count_nonzero(signs == 0)  # each number is in at most two pairs
    tested = [
        (np.full(offsets.size, lag), offsets, values, counts)
        for lag, sums, num_rows in _products(signs, segments(steps))
        for offsets, values, counts in _offsets(sums, lag, width, num_rows)
    ]
    lags, offsets, values, counts = (np.concatenate(arrays) for arrays in zip(*tested, strict=True))
    best = int(np.argmax(np.maximum(np.abs(values) - unsure, 0.0) ** 2 / counts))  # by Hoeffding's bound
    lag, value, count = int(lags[best]), float(values[best]), int(counts[best])
    estimate = float(sign_correlation((count + value) / 2, (count - value) / 2))
    agreeing = (count - min(unsure, count) + abs(value)) / 2
    when = "consecutive steps" if lag == 1 else f"steps {lag} apart"
    return Check(
        name="shifted-noise",
        p_value=bonferroni(float(sign_p_value(math.ceil(agreeing), 0.0, count)), values.size),
        sentence=f"Noise is shared between coordinates {abs(offsets[best]):,} apart"
        f"{f' in {when}' if lag else ' of the same step'}: the correlation is {estimate:.2g}.",
        estimate=estimate,
    )


def _products(signs: SingleArray, runs: list[slice]) -> Iterator[tuple[int, FloatArray, int]]:
    """Yield the sums of products of signs at every offset, for each distance of steps."""
    width = signs.shape[1]
    length = fft.next_fast_len(2 * width, real=True)
    totals = np.sum([_cross_spectra(signs[run], length) for run in runs], axis=0)
    for lag, total in enumerate(totals):
        num_rows = sum(max(0, run.stop - run.start - lag) for run in runs)
        if num_rows:
            sums = np.rint(fft.irfft(total, length))
            # offsets -(width - 1) to width - 1
            yield lag, np.concatenate([sums[length - width + 1 :], sums[:width]]), num_rows


def _cross_spectra(signs: SingleArray, length: int) -> npt.NDArray[np.complex128]:
    """Return the sum over all pairs of rows at each distance of the product of their spectra.

    Rows are in blocks of as many as there are distances, so that all pairs are in two products of matrices:
    those within a block, and those of a block with the next.
    """
    num_blocks = -(-len(signs) // MAX_LAG)
    spectra = np.zeros((length // 2 + 1, num_blocks * MAX_LAG), dtype=np.complex64)
    for start in range(0, len(signs), _FFT_ROWS):
        block = signs[start : start + _FFT_ROWS]
        spectra[:, start : start + len(block)] = fft.rfft(block, length, axis=1).T
    totals = np.zeros((MAX_LAG + 1, len(spectra)), dtype=np.complex128)
    for start in range(0, len(spectra), _FREQUENCIES):
        chosen = slice(start, start + _FREQUENCIES)
        later = spectra[chosen].reshape(-1, num_blocks, MAX_LAG)
        earlier = later.conj().transpose(0, 2, 1)
        same, following = earlier @ later, earlier[:, :, :-1] @ later[:, 1:]
        for lag in range(MAX_LAG + 1):
            totals[lag, chosen] = np.trace(same, lag, axis1=1, axis2=2, dtype=np.complex128)
            totals[lag, chosen] += np.trace(following, lag - MAX_LAG, axis1=1, axis2=2, dtype=np.complex128)
    return totals


def _offsets(
    sums: FloatArray, lag: int, width: int, num_rows: int
) -> Iterator[tuple[IntArray, FloatArray, IntArray]]:
    """Yield offsets with their sums and numbers of pairs: within the vector, and around its end."""
    offsets = np.arange(1 - width, width)
    counts = num_rows * (width - np.abs(offsets))
    if lag == 0:  # the other half is the same; around the end, pairs would form circles
        yield offsets[width:], sums[width:], counts[width:]
        return
    inside = offsets != 0
    yield offsets[inside], sums[inside], counts[inside]
    yield np.arange(1, width), sums[width:] + sums[: width - 1], np.full(width - 1, num_rows * width)


def low_rank_noise(record: NoiseRecord) -> Check | None:
    """Test the squared products of the signs of all pairs of steps: too large if steps share directions.

    Given all earlier steps, the squares of a step are a quadratic form A of fair coins, whose mean
    exp(slope x form) is at most det(1 - 2 slope A)^(-1/2), as for normal variables. The product of the ratios
    over all steps has a mean of at most 1; by Markov's inequality, the inverse of its average over several
    slopes is a p-value.
    """
    signs = record.signs
    num_rows, width = signs.shape
    if num_rows < 2 or width < 2:
        return None
    gram = (signs @ signs.T).astype(np.float64) / width
    squares = width * np.tril(gram, -1) ** 2
    num_pairs = num_rows * (num_rows - 1) / 2
    variance = num_pairs * (1 + 2 * num_rows / (3 * width))
    log_evidence = 14.0  # at which the test of all products is most sensitive: a p-value of 1e-6
    max_slope = 0.2
    best_slope = min(max_slope, math.sqrt(log_evidence / variance))
    total = float(squares.sum())
    slopes = [best_slope * share for share in _SHARES]
    log_mean = _log_mean(_most_log_evidence(gram, total, slopes))
    rounding = 1e-6  # of a bound on the evidence, which is computed in another order
    if log_mean > -rounding:  # otherwise, the p-value is 1 without any decomposition
        log_mean = _log_mean([_log_evidence(gram, total, slope) for slope in slopes])
    share = total / num_pairs
    return Check(
        name="low-rank-noise",
        p_value=math.exp(min(0.0, -log_mean)),
        sentence="The noise of different steps shares directions: squared products of steps are "
        f"{share:.3g} times those of independent noise.",
        estimate=share,
        cause=_cause_of_lag(squares, share) if log_mean > 0 else "",
    )


def _cause_of_lag(squares: FloatArray, share: float) -> str:
    """Return the cause if only steps at certain distances share directions; empty if most of them do.

    In a smaller space, the products of all pairs of steps are larger, whatever their distance.
    """
    excess = np.array([float(np.sum(np.diagonal(squares, -lag) - 1)) for lag in range(1, len(squares))])
    counts = np.arange(len(squares) - 1, 0, -1)
    usual = 0.5  # of the mean excess, above which steps at most distances share directions
    if float(np.median(excess / counts)) > usual * (share - 1):
        return ""
    lag = int(np.argmax(excess)) + 1
    return (
        f"the noise of {'consecutive steps' if lag == 1 else f'steps {lag} apart'} is correlated: is noise "
        "from earlier steps reused or subtracted?"
    )


def _log_mean(logs: Sequence[float]) -> float:
    return float(np.logaddexp.reduce(logs)) - math.log(len(logs))


def _most_log_evidence(gram: FloatArray, total: float, slopes: Sequence[float]) -> list[float]:
    """Return upper bounds on ``_log_evidence`` for each slope, which take much less time.

    They follow from log(1 - x) <= -x - x^2/2 for all eigenvalues x >= 0, whose sums are traces.
    """
    squares = gram * gram
    traces = np.cumsum(np.diag(gram))
    seconds = np.cumsum(np.diag(squares) + 2 * np.tril(squares, -1).sum(axis=1))
    first, second = float(traces[:-1].sum()), float(seconds[:-1].sum())
    return [slope * (total - first) - slope**2 * second for slope in slopes]


def _log_evidence(gram: FloatArray, total: float, slope: float) -> float:
    """Return the logarithm of the product over all steps; minus infinity if it has no finite mean."""
    try:
        factor = np.linalg.cholesky(np.eye(len(gram)) - 2 * slope * gram)
    except np.linalg.LinAlgError:
        return -math.inf
    minors = 2 * np.cumsum(np.log(np.diag(factor)))  # log-determinants of the leading blocks
    return slope * total + float(minors[:-1].sum()) / 2


def common_noise(record: NoiseRecord) -> Check | None:
    """Test the largest singular value of the noise, steps x coordinates, each scaled to the same size.

    That of T x m standard normal numbers exceeds sqrt(T) + sqrt(m) + x with probability at most exp(-x^2/2)
    (Davidson and Szarek 2001). Scaling makes it smaller (simulated). The mean over all steps is subtracted,
    because it may be legitimate (:func:`drift_note`).
    """
    rows = scaled(record.rows)
    if min(rows.shape) < 2:
        return None
    rows -= rows.mean(axis=0)
    small = rows if rows.shape[0] <= rows.shape[1] else rows.T
    last = len(small) - 1
    single = small.astype(np.float32)
    squares = (single @ single.T).astype(np.float64)
    top = math.sqrt(float(linalg.eigvalsh(squares, subset_by_index=[last, last])[0]))
    top -= record.resolution * math.sqrt(rows.size)
    usual = math.sqrt(rows.shape[0]) + math.sqrt(rows.shape[1])
    return Check(
        name="common-noise",
        p_value=math.exp(-(max(0.0, top - usual) ** 2) / 2),
        sentence="The noise of all steps has a common direction: its largest singular value is "
        f"{top / usual:.3g} times that of independent noise.",
        estimate=top / usual,
    )


def scaled_noise(record: NoiseRecord) -> FloatArray:
    """Return the noise of all kept steps, :func:`scaled`."""
    return record.once("scaled", lambda: scaled(record.rows))


def scaled(rows: SingleArray) -> FloatArray:
    """Return the noise with each step, then each coordinate, then each step scaled to a mean square of 1.

    Steps come first, because the scales of coordinates would be those of the few steps with the most noise.
    What is too small to be more than rounding errors stays small.
    """
    result = rows.astype(np.float64)
    squares = np.empty_like(result)  # in place: memory that is new takes more time than arithmetic
    for axis in (1, 0, 1):
        np.multiply(result, result, out=squares)
        result /= np.maximum(np.sqrt(squares.mean(axis=axis, keepdims=True)), RESOLUTION)
    return result


DEPENDENCE_TESTS = (shifted_noise, low_rank_noise, common_noise)

"""Tests of noise that is not independent: shared at an offset, of low rank, or with a common component.

Signs of independent symmetric noise are fair coins whatever its scales, so most of these p-values are exact
or follow from inequalities that hold for any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy
from scipy import fft, linalg

from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics._noise_record import FEW_COORDINATES, NoiseRecord
from dpaudit.diagnostics._p_values import (
    RESOLUTION,
    Check,
    bonferroni,
    sign_correlation,
    sign_p_value,
)
from dpaudit.diagnostics._registry import declare

SingleArray: TypeAlias = npt.NDArray[np.float32]

MAX_LAG = 16  # largest distance of two steps that are compared
_FFT_ROWS, _FREQUENCIES = 256, 128  # that are transformed or multiplied together
_FFT_ERROR = 4.0  # of a sum, in signs
_LOG_EVIDENCE = 14.0  # at which the test of all products is most sensitive: a p-value of 1e-6
_SHARES = (2.0, 1.0, 0.5, 1 / 16, 1 / 256)  # of the most sensitive slope
_MAX_SLOPE = 0.2
_ROUNDING = 1e-6  # of a bound on the evidence, which is computed in another order
_USUAL = 0.5  # of the mean excess, above which steps at most distances share directions
_DRIFT_BLOCK = 32  # steps
_DRIFT_LEVEL = 1e-4
_SUSPICIOUS = 0.05  # p-values above it are not findings at any level in use
_SURE = 1e-4  # p-value below which a test that is explained is mentioned
_SLOW = 0.2  # largest change of a penalty from one step to the next, in noise
_MIN_LEAF = 16  # coordinates of a leaf that may have a decay of its own
_NOTE = (
    "The release contains a multiple of the weights besides the sum and the noise, as with weight decay that "
    "is added after the noise: if it is nothing else, it is not a leak, because weights follow from earlier "
    "releases."
)


def segments(steps: IntArray) -> list[slice]:
    """Return the runs of consecutive steps: one, or two if those in between were not kept."""
    gaps = np.flatnonzero(np.diff(steps) != 1) + 1
    edges = [0, *gaps.tolist(), len(steps)]
    return [slice(first, last) for first, last in pairwise(edges)]


declare(
    "shifted-noise",
    "noise",
    tests="whether coordinates at an offset share noise, in the same step or in steps up to 16 apart",
    matters="The difference of coordinates with the same noise has none.",
    question="is one stream of random numbers read twice, at different places, or is noise rolled?",
    rank=7,
    groups=["shared"],
    may_follow=["noise-by-sum", "low-rank-noise"],
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
    unsure = _FFT_ERROR + 2.0 * np.count_nonzero(signs == 0)  # each number is in at most two pairs
    best, num_tests = _Offset(math.inf, 0, 0, 0.0, 1), 0
    for lag, sums, num_rows in _products(signs, segments(steps)):
        for offsets, values, counts in _offsets(sums, lag, width, num_rows):
            num_tests += values.size
            best = min(best, _most_extreme(values, counts, unsure, lag, offsets), key=lambda one: one.bound)
    if num_tests == 0:
        return None
    estimate = float(sign_correlation((best.count + best.value) / 2, (best.count - best.value) / 2))
    agreeing = (best.count - min(unsure, best.count) + abs(best.value)) / 2
    return Check(
        name="shifted-noise",
        p_value=bonferroni(float(sign_p_value(math.ceil(agreeing), 0.0, best.count)), num_tests),
        sentence=f"Noise is shared between coordinates {abs(best.offset):,} apart"
        f"{best.when}: the correlation is {estimate:.2g}.",
        estimate=estimate,
    )


@dataclass(frozen=True)
class _Offset:
    """The sum of products of signs at one distance of steps and coordinates."""

    bound: float  # logarithm of Hoeffding's bound
    lag: int
    offset: int
    value: float
    count: int

    @property
    def when(self) -> str:
        if self.lag == 0:
            return " of the same step"
        return " in consecutive steps" if self.lag == 1 else f" in steps {self.lag} apart"


def _products(signs: SingleArray, parts: list[slice]) -> Iterator[tuple[int, FloatArray, int]]:
    """Yield the sums of products of signs at every offset, for each distance of steps."""
    width = signs.shape[1]
    length = fft.next_fast_len(2 * width, real=True)
    totals = np.sum([_cross_spectra(signs[part], length) for part in parts], axis=0)
    for lag, total in enumerate(totals):
        num_rows = sum(max(0, part.stop - part.start - lag) for part in parts)
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
    found = np.zeros((MAX_LAG + 1, len(spectra)), dtype=np.complex128)
    for start in range(0, len(spectra), _FREQUENCIES):
        part = slice(start, start + _FREQUENCIES)
        later = spectra[part].reshape(-1, num_blocks, MAX_LAG)
        earlier = later.conj().transpose(0, 2, 1)
        same, following = earlier @ later, earlier[:, :, :-1] @ later[:, 1:]
        for lag in range(MAX_LAG + 1):
            found[lag, part] = np.trace(same, lag, axis1=1, axis2=2, dtype=np.complex128)
            found[lag, part] += np.trace(following, lag - MAX_LAG, axis1=1, axis2=2, dtype=np.complex128)
    return found


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


def _most_extreme(
    values: FloatArray, counts: IntArray, unsure: float, lag: int, offsets: IntArray
) -> _Offset:
    over = np.maximum(np.abs(values) - unsure, 0.0)
    bounds = -(over**2) / (2 * counts)
    best = int(np.argmin(bounds))
    return _Offset(float(bounds[best]), lag, int(offsets[best]), float(values[best]), int(counts[best]))


declare(
    "low-rank-noise",
    "noise",
    tests="whether the noise of different steps shares directions",
    matters="In directions that the noise lacks, the release is the sum.",
    question="is the noise drawn in a smaller space and then projected to all parameters?",
    rank=11,
    may_follow=["shared", "noise-by-sum"],
)


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
    best_slope = min(_MAX_SLOPE, math.sqrt(_LOG_EVIDENCE / variance))
    total = float(squares.sum())
    slopes = [best_slope * share for share in _SHARES]
    log_mean = _log_mean(_most_log_evidence(gram, total, slopes))
    if log_mean > -_ROUNDING:  # otherwise, the p-value is 1 without any decomposition
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
    if float(np.median(excess / counts)) > _USUAL * (share - 1):
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


declare(
    "common-noise",
    "noise",
    tests="whether the noise of all steps has one direction in common",
    matters="What steps share is not new noise.",
    question="do all steps share a part of their noise, or is something else added to the release?",
    rank=12,
    follows=["coordinate-noise", "leaf-noise"],
    may_follow=["shared", "noise-by-sum", "low-rank-noise"],
)


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


# Parts of the noise that are public: what stays for many steps may be, and what follows from the weights is.
# Weight decay that is written into the gradient after the noise is an example. Weights are the first ones
# minus a sum of earlier releases, so the decay depends on earlier sums, but reveals nothing new.


def explained(
    record: NoiseRecord,
    checks: Sequence[Check],
    tests: Mapping[str, Callable[[NoiseRecord], Check | None]],
) -> tuple[list[Check], list[str]]:
    """Return the checks with the largest of their p-values with and without each penalty of the weights.

    Only ``tests`` are repeated, and only if they would have a finding. The largest p-value holds for correct
    noise whatever the others are. The second list has a note if a finding is explained.
    """
    suspects = [check for check in checks if check.name in tests and check.p_value <= _SUSPICIOUS]
    weights = record.weights if suspects else None
    if weights is None:
        return list(checks), []
    decay = weights.astype(np.float64)
    rests = [
        _without(decay, record),
        _without(decay - decay[0], record),
        _without(np.sign(decay), record, jumps=True),
    ]
    found, is_explained = [], False
    for check in checks:
        repeats = [tests[check.name](rest) for rest in rests] if check in suspects else []
        p_value = max([check.p_value, *(again.p_value for again in repeats if again is not None)])
        is_explained |= check.p_value <= _SURE < _SUSPICIOUS < p_value
        found.append(replace(check, p_value=p_value))
    return found, [_NOTE] if is_explained else []


def _without(penalty: FloatArray, record: NoiseRecord, *, jumps: bool = False) -> NoiseRecord:
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
    product, squared, changed, own = (_by_leaf(one.sum(axis=0), sizes) for one in energies)
    factors = np.maximum(product, 0.0) / np.maximum(squared, np.finfo(np.float64).tiny)
    factors[(factors**2 * changed > _SLOW**2 * own) & (not jumps)] = 0.0
    rest = (rows - penalty * np.repeat(factors, sizes)).astype(np.float32)
    return record.with_rows(rest, few_rows=rest[:, :FEW_COORDINATES], few_steps=record.steps)


def _by_leaf(values: FloatArray, sizes: Sequence[int]) -> FloatArray:
    """Return the sum of each leaf; leaves of which few coordinates are kept share theirs."""
    starts, counts = np.cumsum([0, *sizes])[:-1], np.asarray(sizes)
    sums = np.array([values[start : start + size].sum() for start, size in zip(starts, sizes, strict=True)])
    is_small = counts < _MIN_LEAF
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
    if bonferroni(min(p_values), len(p_values)) > _DRIFT_LEVEL:
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

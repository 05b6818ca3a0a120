"""Tests of noise that depends on the data: on the batch of its step, or on sums of this or earlier steps.

The noise of a step must be independent of everything that was known before it was drawn, so given all else,
its sign is a fair coin in each coordinate, and its amount does not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import scipy

from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._dependence_tests import MAX_LAG, segments
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import Check, bonferroni, sign_sum_p_value

_BLOCK = 8  # steps within which amounts of noise are compared, so that a schedule does not matter
_MIN_STEPS = 16
_WORDS = {
    "batch_size": "size of the batch",
    "sum_norm": "norm of the sum",
    "longest": "longest gradient of the batch",
    "num_canaries": "number of canaries in the batch",
}
_NUM_TOTALS = 2  # that are tested besides the squares
_LOST = 2.0  # times the sum of a step that may be missing: all of it is 1, and a reversed sign 2
_USUAL_SHARE = 0.2  # of a sum in the noise: any is detected, but shares of this size most easily
_OLDER = MAX_LAG + 1  # stands for the mean of all sums that are older than the largest lag


def noise_by_batch(record: NoiseRecord) -> Check | None:
    """Test the rank correlation of the amount of noise with each number that describes the batch.

    Ranks are compared within blocks of 8 steps; their covariance is standardized by its variance over all
    permutations of a block. It has shorter tails than the normal distribution that is used.
    """
    energies, found = np.asarray(record.step_energies), []
    for name, values in record.covariates.items():
        given = np.asarray(values)
        is_given = np.isfinite(given)
        if np.count_nonzero(is_given) >= _MIN_STEPS:
            score = _block_correlation(energies[is_given], given[is_given])
            if score is not None:
                found.append((2 * float(scipy.stats.norm.sf(abs(score[0]))), name, score[1]))
    if not found:
        return None
    p_value, name, estimate = min(found)
    return Check(
        name="noise-by-batch",
        p_value=bonferroni(p_value, len(found)),
        sentence=f"The amount of noise depends on the {_WORDS[name]}: their rank correlation is "
        f"{estimate:.2g}.",
        estimate=estimate,
    )


def _block_correlation(energies: FloatArray, given: FloatArray) -> tuple[float, float] | None:
    """Return the standardized covariance of ranks within blocks, and their correlation; None if constant."""
    ranks = scipy.stats.rankdata(given)
    covariance = variance = left = right = 0.0
    end = energies.size // _BLOCK * _BLOCK
    for part in (slice(0, end), slice(end, energies.size)):  # whole blocks, and the rest
        size = min(_BLOCK, energies[part].size)
        if size < 3:
            continue
        own = scipy.stats.rankdata(energies[part].reshape(-1, size), axis=1)
        own -= own.mean(axis=1, keepdims=True)
        other = ranks[part].reshape(-1, size)
        other = other - other.mean(axis=1, keepdims=True)
        squares, others = (own * own).sum(axis=1), (other * other).sum(axis=1)
        covariance += float((own * other).sum())
        variance += float((squares * others).sum()) / (size - 1)
        left, right = left + float(squares.sum()), right + float(others.sum())
    if variance <= 0:
        return None
    return covariance / math.sqrt(variance), covariance / math.sqrt(left * right)


def noise_by_sum(record: NoiseRecord) -> Check | None:
    """Test products of the noise with the known sums of the same step and of earlier steps.

    Given the past and all absolute values, a product that is divided by the root of its sum of squares is a
    weighted sum of fair coins. Its total over all steps and the total of its squares have the tails of normal
    variables at most, by the bounds of Hoeffding and Chernoff; so has the total of undivided products, where
    long sums count more, by the method of mixtures. Sums are taken with and without canaries: hundreds of
    canaries would hide a part of the sum of the examples alone, such as a gradient that contains no canary.
    The p-value is corrected for all sums and totals: half of the error rate belongs to the totals of the same
    step and of the step before, the likeliest ones, the other half to all others.
    """
    rows, steps = record.rows, record.sketches.steps
    found = []
    for sums, words in ((record.known, "sum"), (record.known_examples, "sum of the examples")):
        if sums is None or not sums.any():
            continue
        for lag in range(_OLDER + 1):
            pairs = list(_with_sums_before(rows, sums, steps, lag))
            found += [
                (p_value, estimate, lag, words, lag <= 1 and number < _NUM_TOTALS)
                for number, (p_value, estimate) in enumerate(_sum_p_values(pairs, record.resolution))
            ]
    if not found:
        return None
    num_likely = sum(is_likely for *_, is_likely in found)
    numbers = {True: 2 * num_likely, False: 2 * (len(found) - num_likely)}
    # less of the sum than claimed, as after clipping at a smaller norm, reveals less
    found = [
        (1.0 if one[2] == 0 and -_LOST <= one[1] < 0 else bonferroni(one[0], numbers[one[-1]]), *one[1:])
        for one in found
    ]
    p_value, estimate, lag, words, _ = min(found, key=lambda one: one[0])
    when = {0: "the same step", 1: "the step before", _OLDER: f"more than {MAX_LAG} steps before"}
    return Check(
        name="noise-by-sum",
        p_value=p_value,
        sentence=f"The release contains {estimate:.2g} times the {words} of "
        f"{when.get(lag, f'{lag} steps before')}, besides the sum and the noise.",
        estimate=estimate,
    )


def _with_sums_before(
    rows: ScoreArray, known: ScoreArray, steps: IntArray, lag: int
) -> Iterator[tuple[ScoreArray, ScoreArray]]:
    """Yield the noise of steps with the sums of ``lag`` steps before."""
    if lag == _OLDER:
        later = rows[_OLDER:]
        total, means = np.zeros(known.shape[1]), np.empty(later.shape)
        for index, mean in enumerate(means):  # much faster than a cumulative sum over the first axis
            total += known[index]
            np.divide(total, index + 1, out=mean)
        yield later, means
        return
    for part in segments(steps):
        yield rows[part][lag:], known[part][: max(0, len(known[part]) - lag)]


def _sum_p_values(pairs: list[tuple[ScoreArray, ScoreArray]], resolution: float) -> list[tuple[float, float]]:
    """Return the p-values of both totals and of the squares, each with the share of the sum in the noise."""
    products = np.concatenate([np.einsum("ti,ti->t", noise, sums) for noise, sums in pairs])
    weighted = [noise * sums for noise, sums in pairs]
    spread = np.sqrt(np.concatenate([np.einsum("ti,ti->t", part, part) for part in weighted]))
    sizes = np.concatenate(
        [np.abs(sums, out=part).sum(axis=1) for (_, sums), part in zip(pairs, weighted, strict=True)]
    )
    squares = sum(float(np.vdot(sums, sums)) for _, sums in pairs)
    is_used = spread > 0
    count = int(np.count_nonzero(is_used))
    if count == 0:
        return []
    scores, errors = products[is_used] / spread[is_used], resolution * sizes[is_used] / spread[is_used]
    estimate = float(products.sum()) / squares
    total = max(0.0, abs(float(scores.sum())) - float(errors.sum())) / math.sqrt(count)
    energy = float((np.maximum(np.abs(scores) - errors, 0.0) ** 2).sum())
    undivided = max(0.0, abs(float(products.sum())) - resolution * float(sizes.sum()))
    variance, prior = float((spread**2).sum()), _USUAL_SHARE**-2
    exponent = math.log1p(variance / prior) / 2 - undivided**2 / (variance + prior) / 2
    return [
        (math.exp(min(0.0, exponent)), estimate),
        (min(1.0, 2 * math.exp(-(total**2) / 2)), estimate),
        (sign_sum_p_value(energy, count), estimate),
    ]


DATA_TESTS = (noise_by_batch, noise_by_sum)

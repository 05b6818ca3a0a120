"""Tests of noise that depends on the data: on the batch of its step, or on sums of this or earlier steps.

The noise of a step must be independent of everything that was known before it was drawn, so given all else,
its sign is a fair coin in each coordinate, and its amount does not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import scipy
from numpy.lib.stride_tricks import sliding_window_view
from scipy import special

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._dependence_tests import MAX_LAG, segments
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import (
    Check,
    bonferroni,
    chi_square_cdf,
    sign_sum_p_value,
)

_BEFORE, _AFTER = 7, 12  # steps whose numbers, and whose amounts of noise, a step is compared with
# Weights of the 12 steps with which a straight line through their values is extrapolated to the step before.
_EXTRAPOLATION = (4 * _AFTER + 2 - 6 * np.arange(1, _AFTER + 1)) / (_AFTER * (_AFTER - 1))
_RANK_VARIANCE = 3 / 7 * (1 + float(_EXTRAPOLATION @ _EXTRAPOLATION))  # of a weight, for unrelated numbers
_MOST_WEIGHT = 1.5 * (1 + float(np.abs(_EXTRAPOLATION).sum()))  # weights are at most 2/3 of it
_WORDS = {
    "batch_size": "size of the batch",
    "sum_norm": "norm of the sum",
    "longest": "longest gradient of the batch",
    "num_canaries": "number of canaries in the batch",
}
_OLDER = MAX_LAG + 1  # stands for the mean of all sums that are older than the largest lag
_TINY = 1e-30  # smallest norm of a vector that has a direction
_ALL = MAX_LAG + 2  # stands for all earlier steps
_AT_ONCE = 64  # steps
_AROUND = 6  # steps before and after one that are compared with it
_WHEN = {
    0: "the same step",
    1: "the step before",
    _OLDER: f"more than {MAX_LAG} steps before",
    _ALL: "all steps before",
}


def noise_by_batch(record: NoiseRecord) -> Check | None:
    """Test whether the amount of noise follows a number that describes the batch, such as its size.

    Such a number is known before the noise of its step, but earlier noise may have caused it, through the
    weights. So it is compared with the numbers before it, and the amount of noise with those after it; see
    :func:`_amounts_follow`.
    """
    energies, results = _relative_energies(record), []
    min_steps = 40  # with fewer, no dependence whatever has a p-value below 9e-5
    for name in _WORDS:
        numbers = np.asarray(record.covariates[name])
        is_given = np.isfinite(numbers)
        if np.count_nonzero(is_given) >= min_steps:
            results.append(
                (*_amounts_follow(energies[is_given], numbers[is_given], record.energies.size), name)
            )
    if not results:
        return None
    p_value, estimate, name = min(results)
    return Check(
        name="noise-by-batch",
        p_value=bonferroni(p_value, len(results)),
        sentence=f"The amount of noise depends on the {_WORDS[name]}: their rank correlation is "
        f"{estimate:.2g}, unless both follow a periodic schedule that no optimizer states.",
        estimate=estimate,
    )


def _relative_energies(record: NoiseRecord) -> FloatArray:
    """Return the energies of all steps, relative to the noise that each of them states, if all do.

    A public schedule then cancels. Otherwise, one with the period of the batches would be a finding.
    """
    energies, stated = np.asarray(record.step_energies), np.asarray(record.covariates["noise_multiplier"])
    return energies / stated**2 if (stated > 0).all() else energies


def _amounts_follow(energies: FloatArray, numbers: FloatArray, width: int) -> tuple[float, float]:
    """Return a p-value for energies of ``width`` squares that follow these numbers, and a rank correlation.

    The total is the sum over steps of the rank of the number among the 7 before it, times the logarithm of
    the energy minus its extrapolation from the 12 steps after it. This is a weighted sum of all logarithms.
    Each weight is known before the noise of its step, so that given the past, a power of an energy has the
    mean of a power of a chi-square variable, and the product of all powers, each over its mean, has mean 1:
    Markov's inequality. All weights sum to zero, and so do their products with time, so neither the level of
    the noise matters nor a schedule that is geometric. For other schedules, and for noise that differs
    between coordinates, the p-value is at least that of a sum of ranks with random signs (Hoeffding).
    """
    steps = np.arange(_BEFORE, energies.size - _AFTER)
    logs = np.log(np.maximum(energies, _TINY))
    earlier = sliding_window_view(numbers, _BEFORE)[steps - _BEFORE]
    ranks = np.sign(numbers[steps, None] - earlier).mean(axis=1)
    excess = logs[steps] - sliding_window_view(logs, _AFTER)[steps + 1] @ _EXTRAPOLATION
    total, squares = float(ranks @ excess), float(np.square(ranks * excess).sum())
    if squares == 0:
        return 1.0, 0.0
    weights = np.convolve(ranks, [1.0, *-_EXTRAPOLATION])
    half = width / 2
    variance = _RANK_VARIANCE * steps.size / half  # of the total, if numbers are unrelated
    usual_score = 4.3  # standard errors that the test is most sensitive to: a p-value of 1e-4
    power = min(usual_score / math.sqrt(variance), half / _MOST_WEIGHT)
    powers = math.copysign(power, total) * weights
    excess_log = float((special.gammaln(half + powers) - math.lgamma(half)).sum()) - power * abs(total)
    others = scipy.stats.rankdata(excess) - (steps.size + 1) / 2
    correlation = float(ranks @ others) / math.sqrt(max(float(ranks @ ranks) * float(others @ others), _TINY))
    return min(1.0, 2 * math.exp(min(0.0, max(excess_log, -(total**2) / squares / 2)))), correlation


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
    num_totals = 2  # that are tested besides the squares
    results = [
        (p_value, estimate, products, products.lag <= 1 and number < num_totals)
        for products in record.once("sum products", lambda: list(_products(record)))
        for number, (p_value, estimate) in enumerate(_sum_p_values(products, record.resolution))
    ]
    if not results:
        return None
    num_likely = sum(is_likely for *_, is_likely in results)
    numbers = {True: 2 * num_likely, False: 2 * (len(results) - num_likely)}
    # less of the sum than claimed, as after clipping at a smaller norm, reveals less
    lost = 2.0  # times the sum of a step that may be missing: all of it is 1, and a reversed sign 2
    corrected = [
        (1.0 if along.lag == 0 and -lost <= estimate < 0 else bonferroni(p_value, numbers[is_likely]), place)
        for place, (p_value, estimate, along, is_likely) in enumerate(results)
    ]
    p_value, best = min(corrected)
    _, estimate, along, _ = results[best]
    return Check(
        name="noise-by-sum",
        p_value=p_value,
        sentence=f"The release contains {estimate:.2g} times the {along.described}, besides the sum and the "
        "noise.",
        estimate=estimate,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Products:
    """Products of the noise of steps with vectors, such as the sums of ``lag`` steps before."""

    lag: int
    words: str
    values: FloatArray
    sizes: FloatArray
    """The sums of absolute values of the vectors."""
    squares: FloatArray
    """Their squared norms."""
    spreads: FloatArray = field(default_factory=lambda: np.zeros(0))
    """The roots of the sums of squares that the products consist of, where they are tested."""

    @property
    def described(self) -> str:
        """Which vectors these are."""
        return f"{self.words} of {_WHEN.get(self.lag, f'{self.lag} steps before')}"


def _products(record: NoiseRecord) -> Iterator[_Products]:
    """Yield the products with sums at all lags, with and without canaries."""
    for sums, words in ((record.sums, "sum"), (record.example_sums, "sum of the examples")):
        if sums is None or not sums.any():
            continue
        for lag in range(_OLDER):
            later = _with_earlier(record.steps, lag)
            yield _multiplied(lag, words, record.rows[later], sums[later - lag])
        # of each step after the largest lag, the mean of all sums that are older
        totals = _running_sums(sums[: max(0, len(sums) - _OLDER)], np.float64)
        means = totals / np.arange(1, len(totals) + 1)[:, None]
        yield _multiplied(_OLDER, words, record.rows[_OLDER:], means)


def _with_earlier(steps: IntArray, lag: int) -> IntArray:
    """Return which of the kept steps are ``lag`` steps after another one, without a gap in between."""
    return np.flatnonzero(steps[lag:] - steps[: max(0, steps.size - lag)] == lag) + lag


def _multiplied(lag: int, words: str, noise: ScoreArray, vectors: ScoreArray) -> _Products:
    products = noise * vectors
    return _Products(
        lag=lag,
        words=words,
        values=np.einsum("ti,ti->t", noise, vectors).astype(np.float64),
        sizes=np.abs(vectors).sum(axis=1),
        squares=np.einsum("ti,ti->t", vectors, vectors),
        spreads=np.sqrt(np.einsum("ti,ti->t", products, products)).astype(np.float64),
    )


def _sum_p_values(products: _Products, resolution: float) -> list[tuple[float, float]]:
    """Return the p-values of both totals and of the squares, each with the share of the sum in the noise."""
    is_used = products.spreads > 0
    count = int(np.count_nonzero(is_used))
    if count == 0:
        return []
    total, spreads = float(products.values.sum()), products.spreads[is_used]
    scores, errors = products.values[is_used] / spreads, resolution * products.sizes[is_used] / spreads
    estimate = total / max(float(products.squares.sum()), _TINY)
    divided = max(0.0, abs(float(scores.sum())) - float(errors.sum())) / math.sqrt(count)
    energy = float((np.maximum(np.abs(scores) - errors, 0.0) ** 2).sum())
    undivided = max(0.0, abs(total) - resolution * float(products.sizes.sum()))
    usual_share = 0.2  # of a sum in the noise: any is detected, but shares of this size most easily
    variance, prior = float((spreads**2).sum()), usual_share**-2
    exponent = math.log1p(variance / prior) / 2 - undivided**2 / (variance + prior) / 2
    return [
        (math.exp(min(0.0, exponent)), estimate),
        (min(1.0, 2 * math.exp(-(divided**2) / 2)), estimate),
        (sign_sum_p_value(energy, count), estimate),
    ]


def missing_direction(record: NoiseRecord) -> Check | None:
    """Test how much noise there is in the direction of the sum and of earlier vectors: chi-square.

    These vectors are the sums of :func:`noise_by_sum`, the release and the noise of the step before, and the
    sum of all earlier releases, from which the weights follow. The noise of a step is independent of them. So
    given the past, its component along their direction is normal, and its variance is at least 1 if no
    coordinate has less noise than claimed; the total of its squares is at least as large as a chi-square
    variable. If there is less noise everywhere, it is compared with the noise that there is.
    """
    level, results = min(1.0, record.energy / record.count), []
    if level == 0:
        return None
    products = record.once("sum products", lambda: list(_products(record)))
    for along in (*products, *_with_releases(record)):
        is_used = along.squares > 0
        if not is_used.any():
            continue
        largest = np.abs(along.values[is_used]) + record.resolution * along.sizes[is_used]
        energies = largest * largest / along.squares[is_used]
        p_value = chi_square_cdf(float(energies.sum()) / level, energies.size)
        share = float((along.values[is_used] ** 2 / along.squares[is_used]).mean())
        results.append((p_value, share, along.described))
    if not results:
        return None
    p_value, share, words = min(results)
    return Check(
        name="missing-direction",
        p_value=bonferroni(p_value, len(results)),
        sentence=f"The noise is {_validate.percent(math.sqrt(share), 2)} of the claimed level in the "
        f"direction of the {words}.",
        estimate=math.sqrt(share),
    )


def _with_releases(record: NoiseRecord) -> Iterator[_Products]:
    """Yield the components of the noise of steps along earlier noise and releases, which are public."""
    rows, sums = record.rows, record.sums
    for run in segments(record.steps):
        later, earlier = rows[run][1:], rows[run][:-1]
        if len(later) == 0:
            continue
        vectors: list[tuple[int, str, ScoreArray]] = [(1, "noise", earlier)]
        if sums is not None and sums.any():
            releases = earlier + sums[run][:-1]
            vectors += [(1, "release", releases), (_ALL, "releases", _running_sums(releases, np.float32))]
        for lag, words, directions in vectors:
            norms = np.sqrt(np.einsum("ti,ti->t", directions, directions, dtype=np.float64))
            units = directions / np.maximum(norms, _TINY)[:, None].astype(np.float32)
            yield _Products(
                lag=lag,
                words=words,
                values=np.einsum("ti,ti->t", later, units).astype(np.float64),
                sizes=np.abs(units).sum(axis=1, dtype=np.float64),
                squares=(norms > _TINY).astype(np.float64),
            )


def _running_sums(rows: ScoreArray, dtype: npt.DTypeLike) -> ScoreArray:
    """Return sums of rows up to each: much faster than a cumulative sum over the first axis."""
    total, sums = np.zeros(rows.shape[1]), np.empty(rows.shape, dtype=dtype)
    for row, running in zip(rows, sums, strict=True):
        total += row
        running[:] = total
    return sums


@dataclass(frozen=True, eq=False)
class StepEnergies:
    """The mean square of the scores of absent canaries in each step, which is the noise alone."""

    means: FloatArray
    counts: FloatArray
    kinds: IntArray  # 0: usual, 1: without canaries, 2: with short ones only

    @classmethod
    def of(cls, scores: FloatArray, present: BoolArray, kinds: IntArray) -> StepEnergies:
        """Compute the energy of each step (steps x canaries)."""
        counts = present.shape[1] - np.count_nonzero(present, axis=1).astype(np.float64)
        squares = np.empty(len(scores))
        for start in range(0, len(scores), _AT_ONCE):  # new memory takes more time than arithmetic
            steps = slice(start, start + _AT_ONCE)
            alone = np.where(present[steps], 0.0, scores[steps])
            squares[steps] = np.einsum("ij,ij->i", alone, alone)
        return cls(squares / np.maximum(counts, 1.0), counts, kinds)

    def checks(self) -> Iterator[Check]:
        """Yield the test of the noise with and without canaries."""
        yield from self._leveled()._checks()

    def _leveled(self) -> StepEnergies:
        """Divide by the usual energy of the steps around each: a schedule of the noise must not matter.

        Steps without scores, or with too few usual ones around them, are left out.
        """
        weights = np.where(self.kinds == 0, self.counts, 0.0)
        around = np.array([1.0] * _AROUND + [0.0] + [1.0] * _AROUND)
        logs = weights * np.log(np.maximum(self.means, _TINY))
        sums, numbers = (np.convolve(values, around)[_AROUND:-_AROUND] for values in (logs, weights))
        sure_level = 16  # scores: of 1 canary, fewer gave p-values below 1e-3 in 15 % of correct runs
        is_sure = (numbers >= sure_level) & (self.counts > 0)
        levels = np.exp(sums[is_sure] / numbers[is_sure])
        return StepEnergies(self.means[is_sure] / levels, self.counts[is_sure], self.kinds[is_sure])

    def _checks(self) -> Iterator[Check]:
        rest = self.kinds == 0
        fewest = 3  # steps of a kind, so that their energies have a variance
        p_values = [
            (self._p_value(self.kinds == kind, rest), kind)
            for kind in (1, 2)
            if min(np.count_nonzero(self.kinds == kind), np.count_nonzero(rest)) >= fewest
        ]
        if not p_values:
            return
        p_value, kind = min(p_values)
        ratio = float(np.sqrt(self._mean(self.kinds == kind) / max(self._mean(rest), 1e-300)))
        which = "without canaries" if kind == 1 else "in which all canaries are short"
        yield Check(
            name="noise-by-canaries",
            p_value=min(1.0, len(p_values) * p_value),
            sentence=f"the noise of steps {which} is {ratio:.3g} of the noise of the other steps.",
            estimate=ratio,
        )

    def _mean(self, chosen: BoolArray) -> float:
        return float(self.means[chosen] @ self.counts[chosen] / self.counts[chosen].sum())

    def _p_value(self, chosen: BoolArray, rest: BoolArray) -> float:
        """Return the two-sided p-value of an F test; noise that varies has fewer degrees of freedom."""
        mean, other_mean = self._mean(chosen), self._mean(rest)
        freedom = self._freedom(chosen), self._freedom(rest)
        if min(mean, other_mean) <= 0:
            return 0.0 if max(mean, other_mean) > 0 else 1.0
        ratio = mean / other_mean
        tail = scipy.stats.f.sf(ratio, *freedom), scipy.stats.f.cdf(ratio, *freedom)
        return min(1.0, 2 * float(min(tail)))

    def _freedom(self, chosen: BoolArray) -> float:
        """Return the degrees of freedom of the mean energy, at most the number of scores."""
        counts, means = self.counts[chosen], self.means[chosen]
        number = float(counts.sum())
        overall = self._mean(chosen)
        varying = float(np.mean(counts * (means - overall) ** 2))  # 2 own^2 if noise is the same in all steps
        number /= 1 + 1 / (2 * _AROUND)  # the level of the steps around one has an error, too
        return number / max(1.0, varying / (2 * overall**2)) if overall > 0 else number


DATA_TESTS = (noise_by_batch, noise_by_sum, missing_direction)

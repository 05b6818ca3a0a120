"""Tests of the shape of the noise: the whole distribution, and its tails.

Noise without tails reveals that some sums are impossible, and a few numbers in ten thousand decide it, which
a test of the whole distribution does not see. Too few large numbers are counted in claimed standard
deviations, so that more noise than claimed is never a finding; too many, after the scales of steps and
coordinates cancel.
"""

from __future__ import annotations

import math

import numpy as np
import scipy
from scipy import special

from dpaudit._types import FloatArray, ScoreArray
from dpaudit.diagnostics._dependence_tests import SingleArray, scaled_noise
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import Check, bonferroni, uniform_p_value
from dpaudit.diagnostics._registry import declare

_MAX_RATIOS = 2**17  # number of cross ratios that are tested
# Largest effect of rounding on the distribution of cross ratios, in units of the resolution: 4.1 if each of
# the four numbers is rounded in the worst direction (simulated).
_RATIO_TOLERANCE = 5.0
_FEW = np.arange(1.0, 5.0, 0.5)  # thresholds beyond which there may be too few numbers
# Thresholds beyond which there may be too many: beyond sqrt(3), dividing by a standard deviation of the same
# numbers makes large numbers rarer than those of a normal distribution.
_MANY = np.arange(2.0, 5.0, 0.5)
_MIN_SIZE = 8  # steps and coordinates that are needed for scales


declare(
    "noise-shape",
    "noise",
    tests="whether the noise is normal, by ratios in which all scales cancel",
    matters="Epsilon is computed for normal noise.",
    question="is the noise drawn from another distribution, or truncated?",
    rank=20,
    groups=["tails"],
    may_follow=[
        *("shared", "tied-noise", "noise-by-batch", "noise-by-sum", "low-rank-noise"),
        *("missing-tail", "noise-tails"),
    ],
)


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
    return Check(
        name="noise-shape",
        p_value=uniform_p_value(levels, _RATIO_TOLERANCE * record.resolution),
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


declare(
    "missing-tail",
    "noise",
    tests="the largest numbers of the noise",
    matters="Noise that is cut off reveals that some sums are impossible.",
    question="is the noise truncated, clamped, or a sum of a few uniform numbers?",
    rank=18,
    groups=["tails"],
    follows=["step-noise"],  # numbers of several scales together have other tails
    may_follow=["shared", "tied-noise", "noise-by-batch", "noise-by-sum", "low-rank-noise"],
)


def missing_tail(record: NoiseRecord) -> Check | None:
    """Test the largest numbers of the steps, over all coordinates: noise that is cut off has none.

    In a step with n numbers, -n log P(|x| < largest) is exponential. The smallest of these over all steps is
    tested and their sum, which has a gamma distribution. Where the noise of the whole run is below
    the claim, numbers are compared with that smaller noise, because the amount has a test of its own.
    """
    found = np.asarray([pair for pair in record.largest if pair[1] > 0])
    if found.size == 0 or record.energy == 0:
        return None
    largest = (found[:, 0] + record.resolution) / _scale(record)
    waits = -found[:, 1] * np.log1p(-2 * scipy.stats.norm.sf(largest))
    p_total = float(scipy.stats.gamma.sf(waits.sum(), len(waits)))
    p_values = math.exp(-len(waits) * float(waits.min())), p_total
    top = float(found[:, 0].max())
    return Check(
        name="missing-tail",
        p_value=bonferroni(min(p_values), len(p_values)),
        sentence=f"The noise has no tails: the largest of {int(found[:, 1].sum()):,} numbers is {top:.3g} "
        "claimed standard deviations.",
        estimate=top,
    )


declare(
    "noise-tails",
    "noise",
    tests="how many numbers of the noise are large",
    matters="Epsilon is computed for the tails of normal noise.",
    question="is the noise truncated, or drawn from another distribution?",
    rank=19,
    groups=["tails"],
    follows=["step-noise"],  # numbers of several scales together have other tails
    may_follow=["shared", "tied-noise", "noise-by-batch", "noise-by-sum", "low-rank-noise", "missing-tail"],
)


def noise_tails(record: NoiseRecord) -> Check | None:
    """Count large numbers at several thresholds: binomial, corrected for all thresholds.

    Too few are counted in claimed standard deviations, or in those of the whole run if they are smaller.
    """
    rows = record.rows
    if min(rows.shape) < _MIN_SIZE or record.energy == 0:
        return None
    few = _beyond(rows, _FEW)
    expected = 2 * scipy.stats.norm.sf((_FEW + record.resolution) / _scale(record))
    p_few = np.asarray(scipy.stats.binom.cdf(few, rows.size, expected))
    many = _beyond(scaled_noise(record), _MANY)
    usual = 2 * scipy.stats.norm.sf(_MANY - 2 * record.resolution)
    p_many = np.asarray(scipy.stats.binom.sf(many - 1, rows.size, usual))
    p_value = min(float(p_few.min()), float(p_many.min()))
    if p_few.min() <= p_many.min():
        best = int(np.argmin(p_few))
        word, threshold, ratio = "short", _FEW[best], few[best] / max(rows.size * expected[best], 1.0)
    else:
        best = int(np.argmin(p_many))
        word, threshold, ratio = "long", _MANY[best], many[best] / (rows.size * usual[best])
    return Check(
        name="noise-tails",
        p_value=bonferroni(p_value, _FEW.size + _MANY.size),
        sentence=f"The tails of the noise are too {word}: {ratio:.2g} times as many numbers as in normal "
        f"noise exceed {threshold:g} standard deviations.",
        estimate=float(ratio),
    )


def _scale(record: NoiseRecord) -> float:
    """Return the noise in claimed standard deviations, at most 1."""
    return min(1.0, math.sqrt(record.energy / record.count))


def _beyond(rows: ScoreArray, thresholds: FloatArray) -> FloatArray:
    """Return how many absolute values are above each of the thresholds, which increase."""
    values, found = np.abs(rows).ravel(), []
    for threshold in thresholds:
        values = values[values > threshold]
        found.append(float(values.size))
    return np.asarray(found)


SHAPE_TESTS = (noise_shape, missing_tail, noise_tails)

"""An attack's receiver operating characteristic (ROC), with an interval at each of some false positive rates.

Each true positive rate has an interval of its own. Where canaries share steps, variances are those of counts
per step. Nothing is assumed about the distribution of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.stats._bound import number, restoring
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import chunks
from dpaudit.stats.inference import plausible_rate
from dpaudit.stats.tradeoffs import TradeOff

RATES = 0.001, 0.01, 0.1
"""The false positive rates whose true positive rates are printed."""

COLUMNS = "fpr", "claimed", "reached", "low", "high"
_GRID = [factor * 10**-decade for decade in (5, 4, 3, 2) for factor in (1, 1.5, 2.2, 3.2, 4.6, 6.8)]
_GRID += [0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98]
_ANGLES = np.linspace(-math.pi / 2, math.pi / 2, 17)[:, None]  # which shorten intervals by less than 0.5 %
_SORTED = 1 << 16  # absent scores up to which every one is a threshold
_BINS = 1 << 13  # thresholds for more scores,
_MOST_NUMBERS = _SORTED + 2  # of thresholds
_PLANE_POINTS = 121  # of a drawn curve, at its ends and around the measured rates each

_Side = tuple[ScoreArray, IntArray]
"""The scores of one side, and the flat positions at which its groups of steps end; without steps, one end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RocBand:
    """The true positive rate of the attack at each false positive rate: what it reached, and its interval.

    ``claimed`` is the largest rate that the claim allows for any attack. Each interval has the
    confidence alone, not all of them at once. Its upper end is about this attack: another one may reach more.
    """

    confidence: float
    fpr: FloatArray
    claimed: FloatArray
    reached: FloatArray
    low: FloatArray
    high: FloatArray

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"confidence": self.confidence, **{name: getattr(self, name).tolist() for name in COLUMNS}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RocBand:
        """Restore a band from :meth:`to_dict`; invalid values raise ``InputError``."""
        with restoring("a band", values):
            columns = {
                name: np.asarray([number({name: rate}, name, high=1.0) for rate in values[name]])
                for name in COLUMNS
            }
            fpr, sizes = columns["fpr"], {column.size for column in columns.values()}
            if len(sizes) != 1 or not (np.diff(fpr) > 0).all() or not np.isin(RATES, fpr).all():
                raise ValueError("one true positive rate per ascending false positive rate is needed")
            return cls(confidence=number(values, "confidence", low=0.5, high=1.0), **columns)


def attack_roc(
    sides: list[_Side],
    *,
    center: float,
    deviation: float,
    fnr: Callable[[FloatArray], FloatArray],
    confidence: float,
) -> RocBand:
    """Return the ROC of absent and present scores, given the claimed curve and where the scores are.

    Where the number of absent scores above a threshold is z standard errors from that of the rate, the number
    of present ones is uncertain by sqrt(quantile^2 - z^2) standard errors. The interval is the union of these
    (of ellipses, if both are correlated over steps): where the curve is straight, it is that of the delta
    method, without an estimate of the slope.
    """
    num_absent, num_present = (scores.size for scores, _ in sides)
    numbering = _numbering(sides[0][0], center, deviation)
    absent, present = (_counts_above(scores, numbering) for scores, _ in sides)
    fpr = np.asarray([rate for rate in _GRID if rate >= 1 / num_absent or rate in RATES])
    at_rate = _lowest(absent, np.floor(fpr * num_absent))
    level, effects, correlation = (1 + confidence) / 2, np.ones((2, fpr.size)), np.zeros(fpr.size)
    quantile = float(special.ndtri(level))
    if (steps := sides[0][1].size) > 1:
        quantile = float(special.stdtrit(steps - 1, level))
        errors = [_step_errors(side, numbering, at_rate) for side in sides]
        effects = np.stack([_design_effect(error) for error in errors])
        correlation = (errors[0] * errors[1]).sum(axis=0) / np.sqrt(effects.prod(axis=0))
        correlation = np.clip(correlation, -1.0, 1.0)  # of rounding errors
    off = quantile * np.sin(_ANGLES) * np.sqrt(num_absent * fpr * (1 - fpr) * effects[0])
    rest = np.cos(_ANGLES) * np.sqrt(1 - correlation**2) - np.sin(_ANGLES) * correlation
    fewer, more = np.floor(num_absent * fpr - off), np.ceil(num_absent * fpr + off)
    size, tail = num_present / effects[1], special.ndtr(-quantile * rest)
    hits0 = present[_lowest(absent, np.maximum(fewer, 0))] / effects[1]
    hits1 = present[_lowest(absent, np.minimum(more, num_absent) - 1) - 1] / effects[1]
    # Clopper-Pearson ends, of sizes that need not be integers
    low = special.betaincinv(np.maximum(hits0, 1e-9), size - hits0 + 1, tail)
    high = special.betaincinv(hits1 + 1, np.maximum(size - hits1, 1e-9), 1 - tail)
    low = np.where((fewer >= 0) & (hits0 > 0), low, 0.0).min(axis=0)
    high = np.where((more <= num_absent) & (hits1 < size), high, 1.0).max(axis=0)
    return RocBand(
        confidence=confidence,
        fpr=fpr,
        claimed=np.clip(1 - np.nan_to_num(fnr(fpr)), 0.0, 1.0),
        reached=present[at_rate] / num_present,
        low=np.minimum.accumulate(low[::-1])[::-1],
        high=np.maximum.accumulate(high),
    )


def _numbering(absent: ScoreArray, center: float, deviation: float) -> Callable[[ScoreArray], IntArray]:
    """Return a function to count thresholds below scores: the absent scores or, if many, edges of bins."""
    if absent.size <= _SORTED:
        return np.sort(np.array(absent), axis=None).searchsorted
    reach = 10.0 * deviation if 0 < deviation < math.inf else 1.0

    def bins(scores: ScoreArray) -> IntArray:
        places = (scores - (center - reach)) * (_BINS / (2 * reach))
        return np.asarray(np.clip(places, -1, _BINS - 1).astype(np.int32) + 1)

    return bins


def _counts_above(scores: ScoreArray, numbering: Callable[[ScoreArray], IntArray]) -> IntArray:
    """Return how many scores are above each threshold, from one that all are above to one that none is."""
    counts = np.zeros(_MOST_NUMBERS, dtype=np.int64)
    for _, piece in chunks(scores):
        counts += np.bincount(numbering(piece), minlength=counts.size)
    return np.cumsum(counts[::-1])[::-1]


def _lowest(above: IntArray, most: FloatArray) -> IntArray:
    """Return the lowest threshold with at most this many scores above it."""
    return above.size - np.searchsorted(above[::-1], most, side="right")


def _step_errors(
    side: _Side, numbering: Callable[[ScoreArray], IntArray], thresholds: IntArray
) -> FloatArray:
    """Return, per group of steps and falling threshold, the error of the number of scores above it.

    It is in units of the standard error of the total for independent scores.
    """
    scores, ends = side
    groups, width = ends.size, thresholds.size + 1
    cells = np.zeros(groups * width)
    columns = np.searchsorted(-thresholds, -np.arange(_MOST_NUMBERS))  # the first that a score reaches
    for start, piece in chunks(scores):
        counts = np.diff(np.asarray([start, *np.clip(ends, start, start + piece.size)]))
        places = np.repeat(np.arange(groups) * width, counts) + columns[numbering(piece)]
        cells += np.bincount(places, minlength=cells.size)
    above = np.cumsum(cells.reshape(groups, width), axis=1)
    share = above[:, :-1].sum(axis=0) / scores.size
    variance = (groups - 1) / groups * scores.size * share * (1 - share)
    errors = above[:, :-1] - share * above[:, -1:]
    return np.asarray(errors / np.sqrt(np.where(variance > 0, variance, 1.0)))


def _design_effect(errors: FloatArray) -> FloatArray:
    """Return the variance of each total over that of independent scores, at least 1."""
    effect = np.maximum((errors**2).sum(axis=0), 1.0)
    varies = (errors != 0).any(axis=0)
    return np.asarray(np.where(varies, effect, effect.max()))  # the largest where all scores are on one side


@dataclass(frozen=True, kw_only=True, eq=False)
class ErrorRatePlane:
    """A claimed curve, the curve of the bound, and the measured error rates with their region.

    ``region`` contains both true rates with the stated confidence if all observations are independent:
    it is the product of two Clopper-Pearson intervals, each with half of the error.
    """

    fpr: FloatArray
    claimed: FloatArray
    bound: FloatArray
    counts: ErrorCounts
    confidence: float
    region: tuple[tuple[float, float], tuple[float, float]]

    @classmethod
    def of(
        cls, counts: ErrorCounts, *, tradeoff: TradeOff, claimed: float, bound: float, confidence: float
    ) -> ErrorRatePlane:
        """Return the curves with the parameters ``claimed`` and ``bound``."""
        error = (1 - confidence) / 2
        region = (
            plausible_rate(counts.false_positives, counts.num_absent, error),
            plausible_rate(counts.false_negatives, counts.num_present, error),
        )
        # dense at both ends, where curves bend, and around the measured rates
        ends = np.sin(np.linspace(0, np.pi / 2, _PLANE_POINTS)) ** 2
        near = np.linspace(max(region[0][0] - 0.1, 0.0), min(region[0][1] + 0.1, 1.0), _PLANE_POINTS)
        fpr = np.union1d(ends, near)
        return cls(
            fpr=fpr,
            claimed=_curve(tradeoff, claimed, fpr),
            bound=_curve(tradeoff, bound, fpr),
            counts=counts,
            confidence=confidence,
            region=region,
        )


def _curve(tradeoff: TradeOff, parameter: float, fpr: FloatArray) -> FloatArray:
    # the curve of a parameter of 500 coincides with the axes
    return np.clip(np.nan_to_num(tradeoff.fnr(min(parameter, 500.0), fpr)), 0.0, 1.0)

"""A simultaneous band of an attack's receiver operating characteristic (ROC), at rates that are fixed before.

For each false positive rate of a grid, two absent scores are chosen by their rank: one above which the rate
is at most that of the grid, one above which it is at least that, each except with a small probability that
follows from a Beta distribution, whatever the distribution of the scores. Given the absent scores, the
numbers of present scores above the two are binomial. The error is shared equally by these four events per
rate, so that no calibration is needed; the width is close to that of a Berk-Jones band.

Where canaries share steps, the sizes are divided by the design effect that the counts per step show (Korn and
Graubard 1998): the band is then approximate, and wider if scores of a step depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._plotting import draw_roc
from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.errors import InputError
from dpaudit.stats._binomial import plausible_rate
from dpaudit.stats._bound import number
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._effective_noise import step_ends
from dpaudit.stats._observations import Observations, chunks, require_finite
from dpaudit.stats.tradeoffs import TradeOff

RATES = 0.001, 0.01, 0.1
"""The false positive rates whose true positive rates are reported."""

_WIDE = 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98
_PER_DECADE, _DECADES = 6, 5
_SORTED = 1 << 16  # absent scores up to which every one is a threshold
_BINS = 1 << 13  # thresholds for more scores,
_REACH = 10.0  # in standard deviations around their mean
_CELLS = 1 << 22  # counts per step and threshold in memory
_MOST_POINTS = 1000  # of a stored band
_PLANE_POINTS = 121  # of a drawn curve, at its ends and around the measured rates each
_LEAKIEST = 500.0  # a parameter whose curve coincides with the axes
# Scores that point the wrong way: how improbable they must be without a leak, on how many scores per side,
# and from how many steps on their dependence can be estimated.
_CERTAINLY_REVERSED, _SAMPLED, _ENOUGH_STEPS, _TINY = 1e-6, 1 << 18, 10, 1e-300


@dataclass(frozen=True)
class RocPoint:
    """The true positive rate of the attack at one false positive rate, and the largest that is claimed."""

    fpr: float
    claimed: float
    reached: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RocBand:
    """The true positive rate of the attack at each false positive rate: what it reached, and its band.

    ``claimed`` is the largest rate that the claim allows for any attack. The upper end of the band is about
    this attack: another one may reach more.
    """

    confidence: float
    fpr: FloatArray
    claimed: FloatArray
    reached: FloatArray
    low: FloatArray
    high: FloatArray

    @property
    def points(self) -> tuple[RocPoint, ...]:
        """The points of the band at false positive rates of 0.1, 1 and 10 %."""
        columns = self.fpr, self.claimed, self.reached, self.low, self.high
        found = [int(np.flatnonzero(np.isclose(self.fpr, rate, rtol=1e-9))[0]) for rate in RATES]
        return tuple(RocPoint(*(float(column[i]) for column in columns)) for i in found)

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the attack's ROC with its band and the claimed curve, on logarithmic axes.

        Requires matplotlib. Return the axes: ``ax`` if given, otherwise new ones.
        """
        return draw_roc(self, ax)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = ("fpr", "claimed", "reached", "low", "high")
        return {"confidence": self.confidence, **{name: getattr(self, name).tolist() for name in names}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RocBand:
        """Restore a band from :meth:`to_dict`; invalid values raise ``InputError``."""
        _validate.mapping("the values of a band", values)
        columns = {name: _rates(values, name) for name in ("fpr", "claimed", "reached", "low", "high")}
        sizes = {column.size for column in columns.values()}
        fpr = columns["fpr"]
        if len(sizes) != 1 or not (np.diff(fpr) > 0).all() or not np.isin(RATES, fpr).all():
            raise InputError("Expected roc to have one true positive rate per ascending false positive rate.")
        return cls(confidence=number(values, "confidence", low=0.5, high=1.0), **columns)


def _rates(values: Mapping[str, Any], name: str) -> FloatArray:
    found = values.get(name)
    if not isinstance(found, list) or not len(RATES) <= len(found) <= _MOST_POINTS:
        raise InputError(f"Expected {name} to be a list of at most {_MOST_POINTS:,} rates in roc.")
    return np.asarray([number({name: one}, name, high=1.0) for one in found])


def grid(num_absent: int) -> FloatArray:
    """Return the false positive rates of a band, down to one of this many absent scores.

    >>> grid(100).round(3)[:6]
    array([0.001, 0.01 , 0.015, 0.022, 0.032, 0.046])
    """
    small = 10.0 ** (-np.arange(_PER_DECADE, _PER_DECADE * _DECADES + 1) / _PER_DECADE)
    near = np.min(np.abs(small[:, None] / np.asarray(RATES) - 1), axis=1) < 1e-6  # named rates as given
    return np.union1d(small[(small >= 1 / num_absent) & ~near], (*RATES, *_WIDE))


def attack_band(
    observations: Observations, confidence: float
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return the grid, the rates that were reached, and the lower and upper ends of the band."""
    absent = _SideScores.of(observations, present=False)
    thresholds = _Thresholds.of(absent.scores)
    above = thresholds.count(absent.scores)
    rates = grid(absent.size)
    error = (1 - confidence) / (4 * rates.size)
    at_rate = _first_at_most(above, np.floor(rates * absent.size))
    sizes = absent.effective_sizes(thresholds, at_rate, error)
    fewest, most = _ranks(sizes, rates, error)
    # ranks among this many effective scores, as numbers of all absent scores above a threshold
    allowed = np.where(fewest >= 0, np.floor(fewest / sizes * absent.size), -1)
    needed = np.ceil((most + 1) / sizes * absent.size)
    lower = _first_at_most(above, np.maximum(allowed, 0))
    upper = _last_at_least(above, np.minimum(needed, absent.size))
    present = _SideScores.of(observations, present=True)
    hits = thresholds.count(present.scores) / present.size
    both = present.effective_sizes(thresholds, np.concatenate([lower, upper]), error)
    low = _rate_end(hits[lower], both[: rates.size], error, -1)
    high = _rate_end(hits[upper], both[rates.size :], error, 1)
    low = np.where(allowed >= 0, low, 0.0)
    high = np.where(needed <= absent.size, high, 1.0)
    ends = np.maximum.accumulate(low), np.minimum.accumulate(high[::-1])[::-1]
    return rates, hits[at_rate], *ends


def _first_at_most(above: IntArray, counts: FloatArray) -> IntArray:
    """Return the lowest threshold with at most each count above it; numbers fall with the threshold."""
    return above.size - np.searchsorted(above[::-1], counts, side="right")


def _last_at_least(above: IntArray, counts: FloatArray) -> IntArray:
    """Return the highest threshold with at least each count above it."""
    return above.size - 1 - np.searchsorted(above[::-1], counts, side="left")


def _ranks(sizes: FloatArray, rates: FloatArray, error: float) -> tuple[FloatArray, FloatArray]:
    """Return the largest k with P(Bin(size, rate) <= k) <= error, and the smallest with it >= 1 - error.

    The rate above the absent score with k scores above it is Beta(k + 1, size - k), which is at most ``rate``
    as often as a binomial number is above k.
    """
    low, high = np.full(rates.size, -1.0), sizes.copy()
    rows = []
    for level in (error, 1 - error):
        below, above = low, high  # P <= level at below, and above it at above
        for _ in range(math.ceil(math.log2(float(sizes.max()) + 2))):
            middle = np.floor((below + above) / 2)
            under = _cdf(middle, sizes, rates) <= level
            below, above = np.where(under, middle, below), np.where(under, above, middle)
        rows.append((below, above))
    return rows[0][0], rows[1][1]


def _cdf(counts: FloatArray, sizes: FloatArray, rates: FloatArray) -> FloatArray:
    inside = np.clip(counts, 0, sizes - 1)
    value = special.betaincc(inside + 1.0, sizes - inside, rates)
    return np.where(counts < 0, 0.0, np.where(counts >= sizes, 1.0, value))


def _rate_end(shares: FloatArray, sizes: FloatArray, error: float, sign: int) -> FloatArray:
    """Return one-sided Clopper-Pearson ends of rates that were seen as these shares."""
    hits = shares * sizes
    if sign < 0:
        return np.where(hits > 0, special.betaincinv(np.maximum(hits, 1e-9), sizes - hits + 1, error), 0.0)
    misses = np.maximum(sizes - hits, 1e-9)
    return np.where(hits < sizes, special.betaincinv(hits + 1, misses, 1 - error), 1.0)


def _moments(scores: ScoreArray) -> tuple[float, float]:
    """Return mean and standard deviation, in one pass around the mean of the first chunk."""
    center: float | None = None
    total, squares = 0.0, 0.0
    for _, piece in chunks(scores):
        if center is None:
            center = float(np.mean(piece, dtype=np.float64))
        with np.errstate(over="ignore", invalid="ignore"):  # the caller handles an infinite deviation
            distance = np.subtract(piece, center, dtype=np.float64)
            total, squares = total + float(distance.sum()), squares + float(distance @ distance)
    assert center is not None  # there is at least one score
    shift = total / scores.size
    return center + shift, math.sqrt(max(squares / scores.size - shift * shift, 0.0))


@dataclass(frozen=True, eq=False)
class _Thresholds:
    """Ascending thresholds: at and above each absent score or, for very many scores, the edges of equal bins.

    The number of a score is that of the thresholds that it reaches. Since it does not fall as the score rises
    and depends on absent scores alone, ranks and binomial counts hold for it as for the score.
    """

    values: ScoreArray | None
    start: float
    per_unit: float
    size: int

    @classmethod
    def of(cls, absent: ScoreArray) -> _Thresholds:
        if absent.size <= _SORTED:
            return cls(np.sort(np.array(absent), axis=None), 0.0, 0.0, 2 * absent.size)
        mean, deviation = _moments(absent)
        reach = _REACH * deviation if 0 < deviation < math.inf else 1.0
        return cls(None, mean - reach, _BINS / (2 * reach), _BINS)

    def numbers(self, scores: ScoreArray) -> IntArray:
        """Return the number of each score, from 0 to :attr:`size`."""
        if self.values is not None:
            return np.searchsorted(self.values, scores) + np.searchsorted(self.values, scores, side="right")
        places = (scores - self.start) * self.per_unit
        return np.asarray(np.clip(places, -1, self.size - 1).astype(np.int32) + 1)

    def count(self, scores: ScoreArray) -> IntArray:
        """Return how many scores have at least each number, from 0 to one that none has."""
        found = np.zeros(self.size + 2, dtype=np.int64)
        for _, piece in chunks(scores):
            found += np.bincount(self.numbers(piece), minlength=found.size)
        return np.cumsum(found[::-1])[::-1]


@dataclass(frozen=True, eq=False)
class _SideScores:
    """The scores of one side, in memory or on disk, and where their steps end, if they have steps."""

    scores: ScoreArray
    ends: IntArray | None

    @classmethod
    def of(cls, observations: Observations, *, present: bool) -> _SideScores:
        scores = observations.with_canary if present else observations.without_canary
        ends = step_ends(observations, present=present) if observations.is_stepped else None
        return cls(scores, ends)

    @property
    def size(self) -> int:
        return self.scores.size

    def effective_sizes(self, thresholds: _Thresholds, chosen: IntArray, error: float) -> FloatArray:
        """Return how many independent scores know the rate above each threshold as well as these.

        It is the number of scores over the design effect: the variance of the counts per step over that of
        independent scores. A quantile of Student's t replaces the normal one, as the variance is estimated.
        """
        if self.ends is None:
            return np.full(chosen.size, float(self.size))
        numbers, places = np.unique(chosen, return_inverse=True)
        hits, squares, crossed = np.zeros(numbers.size), np.zeros(numbers.size), np.zeros(numbers.size)
        counts = np.diff(self.ends, prepend=0)
        for steps, above in self._counts_per_step(thresholds, numbers):
            hits += above.sum(axis=0)
            squares += (above**2).sum(axis=0)
            crossed += (above * counts[steps, None]).sum(axis=0)
        rate, used = hits / self.size, int(np.count_nonzero(counts))
        around = squares - 2 * rate * crossed + rate**2 * float((counts.astype(np.float64) ** 2).sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            effect = around / (self.size * rate * (1 - rate)) * used / (used - 1)
        known = effect[np.isfinite(effect)]
        effect = np.where(np.isfinite(effect), effect, known.max(initial=1.0))  # of neighbors, where none is
        wider = float(special.stdtrit(used - 1, error) / special.ndtri(error)) ** 2
        sizes: FloatArray = np.maximum(np.floor(self.size / (np.maximum(effect, 1.0) * wider)), 1.0)
        return sizes[places]

    def _counts_per_step(
        self, thresholds: _Thresholds, chosen: IntArray
    ) -> Iterator[tuple[slice, FloatArray]]:
        """Yield, for blocks of steps, how many scores of each step are at or above each chosen threshold."""
        assert self.ends is not None
        groups = np.searchsorted(chosen, np.arange(thresholds.size + 2), side="right")
        width = chosen.size + 1
        block = max(1, _CELLS // width)
        for first in range(0, self.ends.size, block):
            ends = self.ends[first : first + block]
            counts = np.diff(self.ends[: first + block], prepend=0)[first:]
            start = int(ends[0] - counts[0])
            cells = np.zeros(ends.size * width, dtype=np.int64)
            offsets = np.repeat(np.arange(ends.size) * width, counts)
            for position, piece in chunks(self.scores, start, int(ends[-1])):
                place = groups[thresholds.numbers(piece)]
                place += offsets[position - start : position - start + piece.size]
                cells += np.bincount(place, minlength=cells.size)
            reverse = cells.reshape(ends.size, width)[:, ::-1].astype(np.float64)
            yield slice(first, first + block), np.cumsum(reverse, axis=1)[:, ::-1][:, 1:]


def observed_auc(observations: Observations) -> float:
    """Return the area under the ROC of these scores, or of evenly spaced ones of many."""
    present, absent = (_sample(side, observations)[0] for side in ("with", "without"))
    return 0.5 + float(_placements(present, absent).mean())


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
    return np.clip(np.nan_to_num(tradeoff.fnr(min(parameter, _LEAKIEST), fpr)), 0.0, 1.0)


def require_higher_is_present(observations: Observations, remedy: str) -> None:
    """Raise if scores are lower with the canary than without it, with p < 1e-6 if they are alike.

    The area under the ROC curve is compared with 1/2 by ranks. Scores of a step may be dependent: with
    enough steps, these are also compared as clusters.
    """
    absent, absent_steps = _sample("without", observations)
    present, present_steps = _sample("with", observations)
    above, below = _placements(present, absent), -_placements(absent, present)
    excess = float(above.mean())  # the area minus 1/2
    error = math.sqrt((1 / absent.size + 1 / present.size + 1 / absent.size / present.size) / 12)
    p_value = float(special.ndtr(excess / error))
    number = 1 + int(max(absent_steps.max(), present_steps.max()))
    if observations.is_stepped and number >= _ENOUGH_STEPS:
        steps = np.bincount(present_steps, (above - excess) / above.size, number)
        steps += np.bincount(absent_steps, (below - excess) / below.size, number)
        clustered = max(math.sqrt(float((steps**2).sum())), _TINY)
        p_value = max(p_value, float(special.stdtr(number - 1, excess / clustered)))
    if excess < 0 and p_value < _CERTAINLY_REVERSED:
        raise InputError(
            f"Expected higher scores with the canary than without it, but a score with it is higher in only "
            f"{100 * (0.5 + excess):.3g} % of pairs: if lower scores mean that the canary is present, as "
            f"for a loss, {remedy}; otherwise, check whether the two sides are swapped."
        )


def _sample(side: str, observations: Observations) -> tuple[FloatArray, IntArray]:
    """Return evenly spaced scores of a side, all of a small one, and the step of each."""
    name, steps = f"{side}_canary", getattr(observations, f"{side}_steps")
    scores: ScoreArray = getattr(observations, name)
    spacing = -(-scores.size // _SAMPLED)
    pieces = []
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        pieces.append(piece[-start % spacing :: spacing].astype(np.float64))
    if steps is None:
        steps = np.arange(scores.size) // (scores.shape[1] if scores.ndim == 2 else 1)
    return np.concatenate(pieces), steps[::spacing]


def _placements(scores: FloatArray, others: FloatArray) -> FloatArray:
    """Return the fraction of the others below each score, minus 1/2; half of those that are equal count."""
    ordered = np.sort(others)
    ranks = [np.searchsorted(ordered, scores, side) for side in ("left", "right")]
    return np.asarray((ranks[0] + ranks[1]) / (2 * others.size) - 0.5)

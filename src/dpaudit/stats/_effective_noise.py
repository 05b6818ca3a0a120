"""How far present and absent scores are apart, in standard deviations: the inverse of the effective noise.

One pass over the scores gives power sums per step (:class:`ScoreSums`). If all scores are independent and
normal with the same variance, the mean difference over the pooled standard deviation has a noncentral t
distribution, whose inversion gives an exact interval. Where canaries share steps, only steps are taken as
independent: a jackknife over steps gives the variances and Fieller's method the interval of the ratio, and
the wider of both intervals is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.stats._observations import Observations, chunks
from dpaudit.stats._rootfinding import falling_root

MIN_STEPS = 10
"""The fewest steps from which an interval is computed if canaries share steps."""

_NODES = 160  # of Gauss-Legendre quadrature
_NO_SPREAD = 1e-9  # of a standard deviation that is rounding error
_DEVIATIONS = 9.0  # what a normal distribution has beyond is below 1e-18
# If the scores of a step share one draw, the squares of draws, with a kurtosis of 15, give the standard error
# of the deviation. It is then known as if from a seventh of the steps with normal numbers, of kurtosis 3.
_HEAVY = 7
_PIECE = 1 << 15  # scores whose powers fit into the second-level cache
_CERTAIN = 3.3  # standard errors of a shape that is called not normal: one in a thousand by randomness alone
_TOLERABLE = 0.1  # skewness and excess kurtosis that change the width of intervals by less than 3 %


@dataclass(frozen=True)
class Interval:
    """A number that was estimated, with the two ends of its interval."""

    value: float
    low: float
    high: float

    def mapped(self, function: Callable[[float], float]) -> Interval:
        """Return the interval of a monotone function of the number."""
        ends = sorted((function(self.low), function(self.high)))
        return Interval(function(self.value), *ends)


@dataclass(frozen=True)
class Shape:
    """Skewness and excess kurtosis of the scores around the mean of their side; both are 0 if normal."""

    skewness: float
    kurtosis: float
    is_normal: bool

    def __str__(self) -> str:
        kurtosis = f"excess kurtosis {_short(self.kurtosis)}"
        if self.is_normal:
            return f"they look normal: {kurtosis}"
        return f"they do not look normal: skewness {_short(self.skewness)}, {kurtosis}"


def _short(value: float) -> str:
    return "0" if abs(value) < 0.005 else f"{value:.2g}"


@dataclass(frozen=True, eq=False)
class ScoreSums:
    """The number of scores of one side in each step, and the sums of their powers 1 to 4 around its mean."""

    mean: float
    counts: FloatArray
    powers: FloatArray  # 4 x steps

    @classmethod
    def of(cls, scores: ScoreArray, ends: IntArray) -> ScoreSums:
        """Add up the scores in one pass; ``ends`` are the flat positions at which the steps end."""
        counts = np.diff(ends, prepend=0)
        filled = np.flatnonzero(counts)
        starts = ends[filled] - counts[filled]
        center, powers = 0.0, np.zeros((4, counts.size))
        for start, piece in _pieces(scores):
            if start == 0:
                center = float(np.mean(piece, dtype=np.float64))
            first = int(np.searchsorted(starts, start, side="right")) - 1
            last = int(np.searchsorted(starts, start + piece.size))
            cuts = np.maximum(starts[first:last] - start, 0)
            distance = np.subtract(piece, center, dtype=np.float64)
            power = distance.copy()
            for row in powers:
                row[filled[first:last]] += np.add.reduceat(power, cuts)
                power *= distance
        shift = float(powers[0].sum()) / scores.size
        numbers = counts.astype(np.float64)
        return cls(center + shift, numbers, _recentered(numbers, powers, shift))

    def without_each(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the number, mean and sum of squares around the mean of all scores without each step."""
        number = self.counts.sum() - self.counts
        first = self.powers[0].sum() - self.powers[0]
        squares = self.powers[1].sum() - self.powers[1]
        return number, self.mean + first / number, squares - first**2 / number


def _pieces(scores: ScoreArray) -> Iterator[tuple[int, ScoreArray]]:
    for start, chunk in chunks(scores):
        for offset in range(0, chunk.size, _PIECE):
            yield start + offset, chunk[offset : offset + _PIECE]


def _recentered(counts: FloatArray, powers: FloatArray, shift: float) -> FloatArray:
    """Return the power sums around a center that is higher by ``shift``."""
    every, shift = [counts, *powers], np.float64(shift)  # which overflows to infinity, without an error
    return np.stack(
        [sum(math.comb(k, j) * (-shift) ** (k - j) * every[j] for j in range(k + 1)) for k in range(1, 5)]
    )


@dataclass(frozen=True, eq=False)
class ScoreSpread:
    """Present and absent scores in sums: what an estimate of the noise needs to know of them."""

    present: ScoreSums
    absent: ScoreSums
    is_stepped: bool

    @classmethod
    def of(cls, observations: Observations) -> ScoreSpread:
        """Read the scores once, in chunks."""
        with np.errstate(over="ignore", invalid="ignore"):  # checked by ``missing``
            return cls(
                ScoreSums.of(observations.with_canary, step_ends(observations, present=True)),
                ScoreSums.of(observations.without_canary, step_ends(observations, present=False)),
                observations.is_stepped,
            )

    @property
    def sizes(self) -> tuple[float, float]:
        """The number of present and of absent scores."""
        return float(self.present.counts.sum()), float(self.absent.counts.sum())

    @property
    def degrees(self) -> float:
        """The degrees of freedom of the pooled variance."""
        return sum(self.sizes) - 2

    @property
    def difference(self) -> float:
        """The mean of present scores minus that of absent ones."""
        return self.present.mean - self.absent.mean

    @property
    def deviation(self) -> float:
        """The pooled standard deviation."""
        squares = float(self.present.powers[1].sum() + self.absent.powers[1].sum())
        return math.sqrt(max(squares, 0.0) / self.degrees)

    @property
    def missing(self) -> str | None:
        """The reason why there is no interval, as a sentence; None if there is one."""
        if min(self.sizes) < 2:
            return "An estimate of the noise needs at least 2 scores on each side."
        if self.is_stepped and self.present.counts.size < MIN_STEPS:
            return (
                "Canaries share steps, so scores may depend on each other: an estimate of the noise needs at "
                f"least {MIN_STEPS} steps, got {self.present.counts.size}."
            )
        fourth = float(self.present.powers[3].sum() + self.absent.powers[3].sum())
        if not (math.isfinite(fourth) and self.deviation > _NO_SPREAD * abs(self.difference)):
            return "The scores do not spread like noise: they are all alike, or too large."
        return None

    def separation(self, confidence: float) -> Interval:
        """Return the mean difference over the standard deviation, with its two-sided interval.

        Without steps it is exact for normal scores. With steps, it is the wider of that interval and one that
        takes only steps as independent.
        """
        error, ratio = 1 - confidence, self.difference / self.deviation
        present, absent = self.sizes
        size = math.sqrt(present * absent / (present + absent))
        low, high = (end / size for end in noncentral_interval(ratio * size, self.degrees, error))
        if self.is_stepped:
            by_steps = self._interval_by_steps(error)
            low, high = min(low, by_steps[0]), max(high, by_steps[1])
        return Interval(ratio, low, high)

    def _interval_by_steps(self, error: float) -> tuple[float, float]:
        """Return an interval of difference / deviation that takes only steps as independent.

        A jackknife over steps gives the standard errors of the difference and of the logarithm of the
        deviation, and their correlation.
        """
        (size1, mean1, squares1), (size0, mean0, squares0) = (
            side.without_each() for side in (self.present, self.absent)
        )
        variance = np.maximum(squares1 + squares0, 0.0) / (size1 + size0 - 2)
        steps = variance.size
        with np.errstate(divide="ignore", invalid="ignore"):
            moments = (steps - 1) ** 2 / steps * np.cov(mean1 - mean0, np.log(variance) / 2)
        both = math.sqrt(moments[0, 0] * moments[1, 1])
        correlation = float(moments[0, 1]) / both if both > 0 else 0.0
        reaches = [
            float(special.stdtrit((steps - 1) / share, 1 - error / 2)) * math.sqrt(moments[i, i])
            for i, share in enumerate((1, _HEAVY))
        ]
        low, high = (self._ratio_end(sign, reaches[0], reaches[1], correlation) for sign in (-1, 1))
        return low, high

    def _ratio_end(self, sign: int, reach: float, log_reach: float, correlation: float) -> float:
        """Return an end of the ratio, given the reaches of the difference and of ln(deviation).

        It is where difference - ratio * deviation is as far from 0 as it reaches (Fieller 1954), where the
        deviation has unequal reaches up and down (Donner and Zou 2012).
        """
        difference, deviation = self.difference, self.deviation
        upwards = (difference + sign * reach > 0) == (sign < 0)
        other = deviation * (math.expm1(log_reach) if upwards else -math.expm1(-log_reach))
        square = deviation**2 - other**2
        if not square > 0:
            return 0.0  # a deviation without an upper limit
        middle = difference * deviation - correlation * reach * other
        rest = difference**2 - reach**2
        return (middle + sign * math.sqrt(max(middle**2 - square * rest, 0.0))) / square

    def shape(self) -> Shape:
        """Return the shape of the scores, and whether it differs from normal by more than its error."""
        number, deviation = sum(self.sizes), self.deviation
        powers = [
            deviation**-k * (self.present.powers[k - 1] + self.absent.powers[k - 1]) for k in range(1, 5)
        ]
        first, second, third, fourth = powers
        counts = self.present.counts + self.absent.counts
        skewness, kurtosis = third.sum() / number, fourth.sum() / number - 3
        # Hermite polynomials: the first-order effect of a normal score on skewness and kurtosis
        errors = [
            max(math.sqrt(float((effect**2).sum())) if self.is_stepped else 0.0, math.sqrt(alone * number))
            for effect, alone in ((third - 3 * first, 6), (fourth - 6 * second + 3 * counts, 24))
        ]
        normal = all(
            abs(found) <= max(_TOLERABLE, _CERTAIN * error / number)
            for found, error in zip((skewness, kurtosis), errors, strict=True)
        )
        return Shape(float(skewness), float(kurtosis), normal)


def step_ends(observations: Observations, *, present: bool) -> IntArray:
    """Return the flat positions at which the steps of one side end; all scores are one step without steps."""
    scores = observations.with_canary if present else observations.without_canary
    steps = observations.with_steps if present else observations.without_steps
    if steps is not None:
        return np.asarray(np.searchsorted(steps, np.arange(observations.num_steps), side="right"))
    if scores.ndim == 2:
        return np.asarray(np.arange(1, len(scores) + 1) * scores.shape[1])
    return np.asarray([scores.size])


def noncentral_interval(statistic: float, degrees: float, error: float) -> tuple[float, float]:
    """Return the noncentrality parameters with which a noncentral t is above, or below, in error / 2.

    >>> low, high = noncentral_interval(2.0, 100.0, 0.05)
    >>> round(low, 3), round(high, 3)
    (0.016, 3.975)
    """
    width = math.sqrt(1 + statistic**2 / (2 * degrees))
    ends = []
    for sign in (-1, 1):
        target = -sign * float(special.ndtri(1 - error / 2))

        def excess(center: float, target: float = target) -> tuple[float, float]:
            below = min(max(noncentral_cdf(statistic, degrees, center), 1e-300), 1 - 1e-16)
            return float(special.ndtri(below)) - target, -1 / width

        guess = statistic * (1 - 1 / (4 * degrees)) - target * width  # Johnson and Welch, 1940
        reach = 8 * width + abs(statistic)
        ends.append(falling_root(excess, guess, guess - reach, guess + reach, 1e-9 * width))
    return ends[0], ends[1]


def noncentral_cdf(statistic: float, degrees: float, center: float) -> float:
    """Return P(T <= statistic) of a noncentral t, for any number of degrees of freedom.

    T = (Z + center) / V, where V^2 is chi-squared over its degrees of freedom. Given the one of Z and V on
    which the event depends less sharply, its probability is a known function, and the mean of that is smooth.
    (Series for it, such as scipy's, lose their precision for millions of degrees.)
    """
    if statistic**2 > 2 * degrees:
        if statistic < 0:
            return 1 - noncentral_cdf(-statistic, degrees, -center)
        start = min(max(-center, -_DEVIATIONS), _DEVIATIONS)
        z, weights = _nodes(start, _DEVIATIONS)
        v = (z + center) / statistic
        above = special.gammaincc(degrees / 2, degrees / 2 * np.maximum(v, 0.0) ** 2)
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        return float(special.ndtr(start) + (weights * density * above).sum())
    half = _DEVIATIONS / math.sqrt(2 * degrees)
    v, weights = _nodes(max(1 - half, 0.0), 1 + 1.2 * half)
    logs = (degrees - 1) * np.log(v) - degrees / 2 * (v**2 - 1)
    density = weights * np.exp(logs - logs.max())
    return float((density * special.ndtr(statistic * v - center)).sum() / density.sum())


def _nodes(low: float, high: float) -> tuple[FloatArray, FloatArray]:
    """Return nodes and weights for an integral from ``low`` to ``high``."""
    nodes, weights = _unit_nodes()
    return low + (high - low) * nodes, (high - low) * weights


@cache
def _unit_nodes() -> tuple[FloatArray, FloatArray]:
    nodes, weights = special.roots_legendre(_NODES)
    return (nodes + 1) / 2, weights / 2

"""The distributions of a canary's log-likelihood ratio over a whole DP-SGD run.

The trade-off curve of a run bounds attacks in both directions, with and without the canary exchanged. A
canary that may be in the data set shows only one of them, so the power of an audit needs the distributions
themselves. They are convolutions of the distribution of one step. The moments of one step, of complex order,
determine the privacy losses of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from dpaudit._types import FloatArray
from dpaudit.stats.tradeoffs import Attack

_DEVIATIONS = 8.5
# of integrals along paths in the complex plane: measured against integrals with 30 digits
_REACH = 10.0  # of the noise of a step around its mean, beyond which it has a mass below 1e-23
_RISE = 0.3  # the largest slope of the path of the noise
_NEGLIGIBLE, _OMITTED = -30.0, -60.0  # logarithms of shares of a moment

ComplexArray: TypeAlias = npt.NDArray[np.complex128]


def log_ratio_attack(
    noise: float, sample_rate: float, num_steps: int, assumed_noise: float | None = None
) -> Attack:
    """Return the attack by the log-likelihood ratio of ``num_steps`` steps with this noise multiplier.

    The ratio is computed for ``assumed_noise``, by default the actual noise.
    """
    assumed = noise if assumed_noise is None else assumed_noise
    thresholds, absent, present = _tails(noise, sample_rate, num_steps, assumed)
    return Attack(
        lambda fpr: np.asarray(np.interp(fpr, absent[::-1], 1 - present[::-1])),
        lambda threshold: (
            float(np.interp(threshold, thresholds, absent)),
            1 - float(np.interp(threshold, thresholds, present)),
        ),
    )


@lru_cache(maxsize=64)
def _tails(
    noise: float, sample_rate: float, num_steps: int, assumed: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return thresholds with the probabilities that the sum is above, without and with the canary."""
    normal = np.linspace(-_DEVIATIONS, _DEVIATIONS, 6001)
    weights = np.exp(-(normal**2) / 2)
    weights /= weights.sum()
    outside, inside = (_log_ratio(mean + noise * normal, sample_rate, assumed) for mean in (0.0, 1.0))
    values = np.concatenate([outside, inside])
    steps = [
        _StepRatio(values, np.concatenate([(1 - joins) * weights, joins * weights]))
        for joins in (0.0, sample_rate)
    ]
    ranges = np.asarray([step.sum_range(num_steps) for step in steps])
    reach = float(ranges.max() - ranges.min() + np.ptp(values))
    # eight cells per standard deviation of a step, at most 2^18
    finest = max(min(step.spread for step in steps) / 8, reach / (1 << 18))
    cells = 1 << max(math.ceil(math.log2(reach / finest)), 10)
    places, above = zip(*(step.sum_tail(num_steps, reach / cells, cells) for step in steps), strict=True)
    thresholds = np.union1d(*places)
    absent, present = (np.interp(thresholds, *tail) for tail in zip(places, above, strict=True))
    return thresholds, absent, present


@dataclass(frozen=True, eq=False)
class _StepRatio:
    """The log-likelihood ratio of one step: its values and their probabilities."""

    values: FloatArray
    masses: FloatArray

    @cached_property
    def mean(self) -> float:
        return float(self.masses @ self.values)

    @cached_property
    def spread(self) -> float:
        """The standard deviation."""
        return math.sqrt(float(self.masses @ (self.values - self.mean) ** 2))

    def sum_range(self, num_steps: int) -> tuple[float, float]:
        """Return the ends between which the sum over the steps lies."""
        # the cells cover 12 standard deviations around the mean
        half = 12.0 * math.sqrt(num_steps) * self.spread
        return num_steps * self.mean - half, num_steps * self.mean + half

    def sum_tail(self, num_steps: int, width: float, cells: int) -> tuple[FloatArray, FloatArray]:
        """Return edges of cells, with the probabilities that the sum over the steps is above."""
        start = float(self.values.min())
        step = _spread_over_cells((self.values - start) / width, self.masses, cells)
        total = fft.irfft(power(fft.rfft(step), num_steps), cells)
        # the cells are those around the mean; the transform wraps all others around
        numbers = round(num_steps * (self.mean - start) / width) - cells // 2 + np.arange(cells)
        masses = np.maximum(total[numbers % cells], 0.0)
        above = np.cumsum(masses[::-1])[::-1]
        edges = np.asarray(num_steps * start + (numbers - 0.5) * width, dtype=np.float64)
        return edges, np.asarray(above / above[0], dtype=np.float64)


def _log_ratio(scores: FloatArray, sample_rate: float, noise: float) -> FloatArray:
    """Return the log-likelihood ratio of one step."""
    exponents = (2 * scores - 1) / (2 * noise**2)
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + exponents))


def _spread_over_cells(places: FloatArray, masses: FloatArray, cells: int) -> FloatArray:
    """Divide each mass between the two nearest cells, so that the mean is kept."""
    lower = np.floor(places).astype(np.int64)
    share = places - lower
    counts = np.bincount(lower % cells, masses * (1 - share), cells)
    return np.asarray(counts + np.bincount((lower + 1) % cells, masses * share, cells), dtype=np.float64)


def power(values: ComplexArray, exponent: int) -> ComplexArray:
    """Return the power by repeated squaring, in a tenth of the time of ``values**exponent``."""
    total, square = np.ones_like(values), values
    while True:
        if exponent % 2:
            total *= square
        exponent //= 2
        if not exponent:
            return total
        square = square * square


@dataclass(frozen=True, eq=False)
class StepMoments:
    """Nodes of the integral E[e^(a L)] over the noise of a step, with its log-likelihood ratio L.

    The path of integration is above the real axis, and rises where an example that is included dominates the
    ratio, so that e^(a L) does not oscillate if a is large and imaginary.
    """

    order: float
    ratios: ComplexArray
    log_weights: ComplexArray
    excess: complex  # the integral of e^L - 1, which is 0 up to rounding
    reach: float  # the largest |L| that matters
    rise: float  # slope of the path

    @classmethod
    def of(cls, noise: float, sample_rate: float, num_steps: int, order: float) -> StepMoments:
        # angles of likelihood ratios if an example is removed or added; they vanish at pi
        height = min((1.5, 0.75)[order < 0], 1 / noise)
        spacing = min(0.25, height * noise / 12)
        peak = max(order, 1.0) / noise  # of the noise of a step that includes the example, times e^(a L)
        normal = np.arange(-_REACH, _REACH + peak, spacing)
        inside, outside = math.log(sample_rate), math.log1p(-min(sample_rate, 1 - 1e-16))
        real = np.logaddexp(outside, inside + normal / noise - 0.5 / noise**2)
        log_masses = real * [[max(order, 1.0)], [order]] - normal**2 / 2 + math.log(num_steps)
        real, normal = (
            values[: np.flatnonzero(log_masses[0] > _OMITTED)[-1] + 1] for values in (real, normal)
        )
        reach = float(np.abs(real[log_masses[1, : real.size] > _NEGLIGIBLE]).max())
        # from here on the ratio is mainly that of an example that is included
        turn = 0.5 / noise + noise * (outside - inside)
        past = normal - max(turn, 3.0)
        rise = min(_RISE, 10 * _RISE / max(peak - max(turn, 3.0), 1.0))
        root = np.hypot(past, min(noise, 1.0))
        path = normal + 1j * (height * noise + rise * (root + past) / 2)
        direction = 1 + 0.5j * rise * (1 + past / root)
        log_weights = np.log(direction * spacing / math.sqrt(2 * math.pi)) - path**2 / 2
        exponents = path / noise - 0.5 / noise**2
        early, late = np.split(exponents, [np.searchsorted(normal, turn)])
        late_ratios = late + inside + special.log1p(np.exp(outside - inside - late))
        ratios = np.concatenate([special.log1p(sample_rate * np.expm1(early)), late_ratios])
        excess = sample_rate * (np.exp(exponents + log_weights) - np.exp(log_weights)).sum()
        return cls(order, ratios, log_weights, complex(excess), reach, rise)

    def logs(self, orders: ComplexArray) -> ComplexArray:
        """Return ln E[e^(a L)] for each a, without the part of first order, in which large terms cancel."""
        # terms with smaller weights are computed by their logarithms
        weights, is_inner = np.exp(self.log_weights), self.log_weights.real > -20.0
        moments = np.empty_like(orders)
        num_blocks = 1 + orders.size * self.ratios.size // 200_000
        for block in np.array_split(np.arange(orders.size), num_blocks):
            exponents = orders[block, None] * self.ratios
            moments[block] = np.expm1(exponents[:, is_inner]) @ weights[is_inner]
            outer = np.exp(exponents[:, ~is_inner] + self.log_weights[~is_inner])
            moments[block] += outer.sum(axis=1) - weights[~is_inner].sum()
        return np.asarray(special.log1p(moments - orders * self.excess))

    def derivatives(self) -> tuple[float, float, float]:
        """Return ln E[e^(a L)] and its first two derivatives at a = order."""
        terms = np.exp(self.order * self.ratios + self.log_weights)
        value = float(self.logs(np.asarray([self.order + 0j]))[0].real)
        first = float(((self.ratios * terms).sum() - self.excess).real) / math.exp(value)
        second = float((self.ratios**2 * terms).sum().real) / math.exp(value)
        return value, first, second - first**2

    @property
    def mean_size(self) -> float:
        """The mean of |L|, on the path."""
        return float(np.abs(self.ratios) @ np.exp(self.log_weights.real))

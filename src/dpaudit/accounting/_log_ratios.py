"""The distributions of a canary's log-likelihood ratio over a whole DP-SGD run.

The trade-off curve of a run bounds attacks in both directions, with and without the canary exchanged. A
canary that may be in the data set shows only one of them, so the power of an audit needs the distributions
themselves. They are convolutions of the distribution of one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy import fft

from dpaudit._types import FloatArray
from dpaudit.accounting._pld import power
from dpaudit.stats.tradeoffs import Attack

_DEVIATIONS = 8.5


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

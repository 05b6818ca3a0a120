"""The attack for which the power of an audit is stated: the distributions of its scores.

A trade-off curve bounds all attacks at once, and no single mechanism attains that of (eps, delta)-DP with
continuous scores. Power is therefore computed for the scores of one mechanism with the given parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import special

from dpaudit._types import FloatArray
from dpaudit.stats.rootfinding import last_true

_DEVIATIONS = 9.0  # how far tables of probit scores extend
_POINTS = 3601
MECHANISMS = GAUSSIAN_NOISE, LAPLACE_NOISE = "Gaussian noise", "Laplace noise"


@dataclass(frozen=True, eq=False)
class Attack:
    """The error rates of an attack at every threshold.

    ``fnr`` maps a false positive rate to the false negative rate at the same threshold. ``rates_at`` maps a
    threshold of normalized scores to both rates; it is None if nothing but the curve is known.
    """

    fnr: Callable[[FloatArray], FloatArray]
    rates_at: Callable[[float], tuple[float, float]] | None = None

    def rates(self, probits: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return both rates at thresholds of probit scores, which are normal for absent canaries."""
        fpr = special.ndtr(-np.asarray(probits, dtype=np.float64))
        return fpr, self.fnr(fpr)

    def in_units(self, signal: float) -> Attack:
        """Return the attack with scores whose mean with the canary is ``signal`` instead of 1."""
        rates_at = self.rates_at
        return self if rates_at is None else replace(self, rates_at=lambda at: rates_at(at / signal))

    def balanced(self) -> tuple[float, float]:
        """Return both rates at the threshold with the smallest balanced error."""
        if self._is_symmetric:
            low, high = 0.0, 0.5
            for _ in range(50):
                middle = (low + high) / 2
                above = float(self.fnr(np.asarray(middle))) > middle
                low, high = (middle, high) if above else (low, middle)
            return low, low
        probits, below = self._table
        best = int(np.argmin(special.ndtr(-probits) + below))
        return float(special.ndtr(-probits[best])), float(below[best])

    def auc(self) -> float:
        """Return the probability that a present canary scores higher than an absent one."""
        probits, below = self._table
        density = np.exp(-(probits**2) / 2)
        return 1 - float(density @ below / density.sum())

    def exchanged(self) -> Attack:
        """Return the attack with the two sides, and the order of scores, exchanged."""
        probits, fnr = self._table
        return Attack(lambda rate: np.asarray(np.interp(rate, fnr, special.ndtr(-probits))))

    @property
    def _is_symmetric(self) -> bool:
        rates = np.asarray([0.001, 0.1, 0.3])
        return bool(np.allclose(self.fnr(self.fnr(rates)), rates, rtol=1e-3, atol=1e-9))

    @cached_property
    def _table(self) -> tuple[FloatArray, FloatArray]:
        """Probit scores in ascending order, with the probability that a present canary scores lower."""
        probits = np.linspace(-_DEVIATIONS, _DEVIATIONS, _POINTS)
        return probits, np.maximum.accumulate(self.rates(probits)[1])

    def present_scores(self, uniform: FloatArray) -> FloatArray:
        """Return probit scores of present canaries, from uniform random numbers."""
        probits, below = self._table
        return np.interp(uniform, below, probits)

    def pooled_quantiles(self, levels: FloatArray, share_present: float) -> FloatArray:
        """Return quantiles of the probit scores of absent and present canaries together."""
        probits, below = self._table
        pooled = (1 - share_present) * special.ndtr(probits) + share_present * below
        return np.interp(levels, pooled, probits)


def gaussian_attack(mu: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
    """Return the attack whose scores are N(0, 1/mu^2) without and N(1, 1/mu^2) with the canary.

    ``lengths`` are equally frequent lengths of canaries in units of the sensitivity. Each score is in units
    of the length of its canary, so that the noise of a short one is larger.
    """
    # an infinite mu times zero is no number
    mus = min(mu, 1e300) * np.asarray(lengths, dtype=np.float64)

    def rates_at(threshold: float) -> tuple[float, float]:
        fpr, fnr = special.ndtr(np.asarray([-threshold, threshold - 1])[:, None] * mus).mean(axis=1)
        return float(fpr), float(fnr)

    if len(set(lengths)) == 1:
        return Attack(lambda fpr: special.ndtr(-special.ndtri(fpr) - mus[0]), rates_at)
    # the threshold of all scores, in units of the shortest canary's noise, at which the fpr is as given
    thresholds = np.linspace(-_DEVIATIONS, _DEVIATIONS + mus.max(), _POINTS) / max(mus.min(), 1e-12)
    fprs, fnrs = (
        special.ndtr(sign * np.multiply.outer(thresholds - shift, mus)).mean(axis=1)
        for sign, shift in ((-1, 0), (1, 1))
    )
    return Attack(lambda fpr: np.interp(fpr, fprs[::-1], fnrs[::-1]), rates_at)


def sampled_attack(mu: float, rate: float) -> Attack:
    """Return the attack on one step that contains the canary with probability ``rate``."""

    def rates_at(threshold: float) -> tuple[float, float]:
        fpr, outside, inside = special.ndtr(np.asarray([-threshold, threshold, threshold - 1]) * mu)
        return float(fpr), float((1 - rate) * outside + rate * inside)

    def fnr(fpr: FloatArray) -> FloatArray:
        return (1 - rate) * (1 - fpr) + rate * special.ndtr(-special.ndtri(fpr) - mu)

    return Attack(fnr, rates_at)


def laplace_attack(epsilon: float, curve: Callable[[FloatArray], FloatArray]) -> Attack:
    """Return the attack whose scores are Laplace(0, 1/eps) without and Laplace(1, 1/eps) with the canary."""

    def below(value: float) -> float:
        tail = float(np.exp(-abs(value) * epsilon)) / 2
        return tail if value < 0 else 1 - tail

    return Attack(curve, lambda threshold: (below(-threshold), below(threshold - 1)))


def signal_share(falls_short: Callable[[float], bool], tolerance: float) -> float:
    """Return the largest share of an ideal attack's signal that falls short of what was seen, at most 1."""
    if not falls_short(0.001):
        return 0.0
    return min(last_true(lambda share: share <= 1 and falls_short(share), 0.3, tolerance), 1.0)

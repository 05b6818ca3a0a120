"""The interface of trade-off families, the attack behind a stated power, and the families of additive noise.

A trade-off curve bounds all attacks at once, and no single mechanism attains that of (eps, delta)-DP with
continuous scores. Power is therefore computed for the scores of one mechanism with the given parameter.
Gaussian differential privacy is that of Dong, Roth and Su 2019.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Self

import numpy as np
from scipy import special

from dpaudit._types import ArrayLike, FloatArray
from dpaudit.stats._serialization import Serializable
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


class TradeOff(Serializable, ABC):
    """A one-parameter family of symmetric trade-off curves; a larger parameter means a larger leak.

    A curve bounds every attack on the mechanism: ``fnr >= curve(fpr)``. Symmetric means that exchanging
    the two error rates changes nothing, as for every mechanism under add-or-remove adjacency.
    """

    # The displayed name of the parameter, such as mu, epsilon or 1/noise_multiplier.
    symbol: ClassVar[str] = "epsilon"
    # Whether the parameter is inversely proportional to the noise.
    is_inverse_noise: ClassVar[bool] = False

    @abstractmethod
    def assumption(self, delta: float) -> str | None:
        """Return what a bound at ``delta`` assumes about the mechanism's curve; None if nothing."""

    @abstractmethod
    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        """Return the curve: the smallest fnr of any attack with this fpr."""

    @abstractmethod
    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        """Return the largest parameter whose curve lies above these error rates, 0 if there is none."""

    @abstractmethod
    def epsilon(self, parameter: float, delta: float) -> float:
        """Return the epsilon at ``delta`` of a mechanism with this parameter, rounded down."""

    def at(self, delta: float) -> Self:
        """Return the family for a query at ``delta``; only (eps, delta)-DP depends on it."""
        del delta
        return self

    def with_epsilon(self, epsilon: float, delta: float) -> float:
        """Return the parameter of the mechanism whose epsilon at ``delta`` is ``epsilon``."""
        return last_true(lambda p: self.epsilon(p, delta) <= epsilon, tolerance=1e-9)

    def balanced_error(self, parameter: float) -> float:
        """Return the smallest (fpr + fnr) / 2 of any attack: (1 - total variation) / 2.

        A symmetric curve attains it where fpr and fnr are equal.
        """
        low, high = 0.0, 0.5
        for _ in range(60):
            middle = (low + high) / 2
            above = float(self.fnr(parameter, np.asarray(middle))) > middle
            low, high = (middle, high) if above else (low, middle)
        return low

    @property
    def attacked_mechanism(self) -> str | None:
        """The mechanism for which power is stated, if it does not follow from the curve."""
        return None

    def attack(self, parameter: float, delta: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
        """Return the attack for which power is stated; by default it attains the curve.

        ``lengths`` are equally frequent lengths of canaries, in units of the sensitivity: a short canary
        reveals less, if the parameter is inversely proportional to noise.
        """
        del delta
        length = float(np.mean(lengths)) if self.is_inverse_noise else 1.0
        return Attack(partial(self.fnr, length * parameter))

    def from_balanced_error(self, error: float) -> float:
        """Return the largest parameter whose smallest balanced error is above ``error``."""
        rate = np.asarray(error, dtype=np.float64)
        return float(self.parameter(rate, rate))


def at_least_zero(values: ArrayLike) -> FloatArray:
    """Return the values, with 0 where they are negative or undefined (0/0 and inf - inf)."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(array > 0, array, 0.0)


@dataclass(frozen=True)
class Gaussian(TradeOff):
    """mu-GDP: the curve for distinguishing N(0, 1) from N(mu, 1); mu is sensitivity over noise.

    >>> round(Gaussian().epsilon(1.0, 1e-5), 3)
    4.377
    """

    symbol: ClassVar[str] = "mu"
    is_inverse_noise: ClassVar[bool] = True

    def assumption(self, delta: float) -> str | None:
        del delta
        return "the mechanism's trade-off curve is Gaussian (mu-GDP)"

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        return special.ndtr(-special.ndtri(fpr) - parameter)

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore"):
            return at_least_zero(-special.ndtri(fpr) - special.ndtri(fnr))

    def epsilon(self, parameter: float, delta: float) -> float:
        if parameter == 0 or delta >= self.delta(parameter, 0.0):
            return 0.0
        if delta == 0 or math.isinf(parameter):
            return math.inf
        # delta(eps) <= Phi(mu/2 - eps/mu), so this is an upper bound on the answer
        high = parameter * (parameter / 2 - float(special.ndtri(delta)))
        if math.isinf(high):
            return math.inf
        # search for a fraction of it, so that the limits of the search do not truncate the answer
        return high * last_true(lambda part: self.delta(parameter, part * high) > delta, 1.0, tolerance=1e-12)

    def delta(self, parameter: float, epsilon: float) -> float:
        """Return the delta at ``epsilon``, computed in logarithms so that neither factor overflows."""
        if math.isinf(parameter):
            return 1.0
        upper = float(special.log_ndtr(parameter / 2 - epsilon / parameter))
        lower = float(special.log_ndtr(-parameter / 2 - epsilon / parameter))
        return math.exp(upper) * -math.expm1(min(epsilon + lower - upper, 0.0))

    def balanced_error(self, parameter: float) -> float:
        return float(special.ndtr(-parameter / 2))

    def attack(self, parameter: float, delta: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
        del delta
        return gaussian_attack(parameter, lengths)


@dataclass(frozen=True)
class Laplace(TradeOff):
    """The curve for distinguishing Laplace(0, 1) from Laplace(eps, 1); eps is sensitivity over scale.

    >>> round(float(Laplace().fnr(1.0, 0.5)), 4)
    0.1839
    """

    is_inverse_noise: ClassVar[bool] = True

    def assumption(self, delta: float) -> str | None:
        del delta
        return "the mechanism's trade-off curve is that of the Laplace mechanism"

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        rate = np.asarray(fpr, dtype=np.float64)
        with np.errstate(divide="ignore", over="ignore"):
            log_rate = np.log(rate)
            steep = 1 - np.exp(parameter + log_rate)
            middle = np.exp(-parameter - log_rate) / 4
        flat = np.exp(-parameter) * (1 - rate)
        low = log_rate < -parameter - math.log(2)
        return at_least_zero(np.where(low, steep, np.where(rate <= 0.5, middle, flat)))

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        small, large = np.minimum(fpr, fnr), np.maximum(fpr, fnr)
        with np.errstate(divide="ignore", invalid="ignore"):
            # the curve is a line where the larger rate is above 1/2, and a hyperbola elsewhere
            line = np.log1p(-large) - np.log(small)
            hyperbola = -np.log(4 * small * large)
        return at_least_zero(np.where(large > 0.5, line, hyperbola))

    def epsilon(self, parameter: float, delta: float) -> float:
        # delta(eps) = 1 - exp((eps - parameter) / 2)
        return max(parameter + 2 * math.log1p(-delta), 0.0)

    def with_epsilon(self, epsilon: float, delta: float) -> float:
        return epsilon - 2 * math.log1p(-delta)

    def balanced_error(self, parameter: float) -> float:
        return math.exp(-parameter / 2) / 2

    def attack(self, parameter: float, delta: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
        del delta
        epsilon = parameter * float(np.mean(lengths))
        return laplace_attack(epsilon, partial(self.fnr, epsilon))

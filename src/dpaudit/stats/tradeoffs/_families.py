"""Trade-off families: the interface, and families in closed form.

Gaussian differential privacy (Dong, Roth and Su 2019), the Laplace mechanism, randomized response over k
values, and (eps, delta)-DP and pure eps-DP, for privacy claims that name no mechanism.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._types import ArrayLike, FloatArray
from dpaudit.stats._serialization import Serializable
from dpaudit.stats.rootfinding import last_true
from dpaudit.stats.tradeoffs._attack import (
    GAUSSIAN_NOISE,
    LAPLACE_NOISE,
    Attack,
    gaussian_attack,
    laplace_attack,
)


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


def ratio_epsilon(fpr: FloatArray, fnr: FloatArray, delta: float | FloatArray) -> FloatArray:
    """Return the largest epsilon of (eps, delta)-DP that these error rates refute, in either direction.

    Paper, section 2.3: the maximum of ln((1 - delta - fpr) / fnr) and ln((1 - delta - fnr) / fpr).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.log(np.maximum(1 - delta - fnr, 0)) - np.log(fpr)
        other = np.log(np.maximum(1 - delta - fpr, 0)) - np.log(fnr)
    return at_least_zero(np.fmax(log_ratio, other))


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


@dataclass(frozen=True)
class RandomizedResponse(TradeOff):
    """Randomized response: the true value with probability e^eps / (e^eps + k - 1), else another of the k.

    >>> RandomizedResponse().epsilon(1.0, 0.0)
    1.0
    """

    num_values: int = 2

    def __post_init__(self) -> None:
        _validate.integer("num_values", self.num_values, low=2)

    def assumption(self, delta: float) -> str | None:
        del delta
        return f"the mechanism is randomized response over {self.num_values} values"

    def _log_lie(self, parameter: float) -> float:
        """Return the log probability of any one wrong value."""
        return -float(np.logaddexp(parameter, math.log(self.num_values - 1)))

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        rate = np.asarray(fpr, dtype=np.float64)
        lie = math.exp(self._log_lie(parameter))
        neither = (self.num_values - 2) * lie
        with np.errstate(divide="ignore", over="ignore"):
            steep = 1 - np.exp(parameter + np.log(rate))
        # between the two values, the k - 2 others carry no information: the slope is -1 there
        blind = lie + neither + lie - rate
        flat = np.exp(-parameter) * (1 - rate)
        return at_least_zero(np.maximum(np.maximum(steep, blind), flat))

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        small, large = np.minimum(fpr, fnr), np.maximum(fpr, fnr)
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.log1p(-large) - np.log(small)
            # the errors of k lies: k e^lie = fpr + fnr, so e^eps = k / (fpr + fnr) - (k - 1)
            middle = np.log(np.maximum(self.num_values / (small + large) - self.num_values + 1, 0))
        best = np.fmax(ends, middle) if self.num_values > 2 else ends
        return at_least_zero(best)

    def epsilon(self, parameter: float, delta: float) -> float:
        # delta(eps) = truth - e^eps lie
        log_lie = self._log_lie(parameter)
        excess = math.exp(parameter + log_lie) - delta
        return max(math.log(excess) - log_lie, 0.0) if excess > 0 else 0.0


def approximate_fnr(epsilon: float | FloatArray, delta: float | FloatArray, fpr: FloatArray) -> FloatArray:
    """Return max(0, 1 - delta - e^eps fpr, e^-eps (1 - delta - fpr)), without overflow for any eps."""
    with np.errstate(divide="ignore", over="ignore"):
        steep = 1 - delta - np.exp(epsilon + np.log(fpr))
    flat = np.exp(-np.asarray(epsilon)) * (1 - delta - fpr)
    return at_least_zero(np.maximum(steep, flat))


@dataclass(frozen=True)
class ApproximateDP(TradeOff):
    """(eps, delta)-DP at the delta of the query, without assumptions about the mechanism.

    >>> round(float(ApproximateDP(1e-5).parameter(0.01, 0.5)), 3)
    3.912
    """

    delta: float = 0.0

    def __post_init__(self) -> None:
        _validate.delta(self.delta)

    def assumption(self, delta: float) -> str | None:
        del delta
        return None

    def at(self, delta: float) -> ApproximateDP:
        return replace(self, delta=delta)

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        return approximate_fnr(parameter, self.delta, fpr)

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        return ratio_epsilon(fpr, fnr, self.delta)

    def epsilon(self, parameter: float, delta: float) -> float:
        del delta  # at() has set it
        return parameter

    def with_epsilon(self, epsilon: float, delta: float) -> float:
        del delta
        return epsilon

    def balanced_error(self, parameter: float) -> float:
        return (1 - self.delta) * math.exp(-np.logaddexp(0.0, parameter))

    @property
    def attacked_mechanism(self) -> str:
        return LAPLACE_NOISE if self.delta == 0 else GAUSSIAN_NOISE

    def attack(self, parameter: float, delta: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
        """Return the attack on the Gaussian mechanism with this epsilon, or on Laplace's at delta = 0."""
        if self.delta == 0:
            return Laplace().attack(parameter, delta, lengths)
        return gaussian_attack(Gaussian().with_epsilon(parameter, self.delta), lengths)


@dataclass(frozen=True)
class PureDP(TradeOff):
    """Pure eps-DP: assumes nothing at delta = 0, and at delta > 0 that the mechanism has exactly this curve.

    It is the curve of randomized response: at delta > 0 its epsilon is ln(e^eps - delta (1 + e^eps)).
    """

    def assumption(self, delta: float) -> str | None:
        return "the mechanism's trade-off curve is that of pure epsilon-DP" if delta > 0 else None

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        return approximate_fnr(parameter, 0.0, fpr)

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        return ratio_epsilon(fpr, fnr, 0.0)

    def epsilon(self, parameter: float, delta: float) -> float:
        # (e^eps - delta (1 + e^eps)) = e^eps (1 - delta (1 + e^-eps))
        excess = 1 - delta * (1 + math.exp(-parameter))
        return max(parameter + math.log(excess), 0.0) if excess > 0 else 0.0

    def balanced_error(self, parameter: float) -> float:
        return math.exp(-np.logaddexp(0.0, parameter))

    def attack(self, parameter: float, delta: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
        if delta > 0:  # the curve itself is assumed
            return super().attack(parameter, delta, lengths)
        return Laplace().attack(parameter, delta, lengths)

"""Trade-off families in closed form.

Gaussian differential privacy (Dong, Roth and Su 2019), the Laplace mechanism, randomized response over k
values, and (eps, delta)-DP and pure eps-DP, for privacy claims that name no mechanism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.stats.rootfinding import last_true
from dpaudit.stats.tradeoffs._attack import (
    GAUSSIAN_NOISE,
    LAPLACE_NOISE,
    Attack,
    gaussian_attack,
    laplace_attack,
)
from dpaudit.stats.tradeoffs._base import TradeOff, at_least_zero, ratio_epsilon


@dataclass(frozen=True)
class Gaussian(TradeOff):
    """mu-GDP: the curve for distinguishing N(0, 1) from N(mu, 1); mu is sensitivity over noise.

    >>> round(Gaussian().epsilon(1.0, 1e-5), 3)
    4.377
    """

    @property
    def symbol(self) -> str:
        return "mu"

    @property
    def is_inverse_noise(self) -> bool:
        return True

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

    @property
    def symbol(self) -> str:
        return "epsilon"

    @property
    def is_inverse_noise(self) -> bool:
        return True

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

    @property
    def symbol(self) -> str:
        return "epsilon"

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

    @property
    def symbol(self) -> str:
        return "epsilon"

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

    @property
    def symbol(self) -> str:
        return "epsilon"

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

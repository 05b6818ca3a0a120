"""Gaussian differential privacy (Dong, Roth and Su 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit.stats._search import last_true
from dpaudit.stats._types import FloatArray, at_least_zero
from dpaudit.stats.tradeoffs._base import TradeOff

__all__ = ["Gaussian"]


@dataclass(frozen=True)
class Gaussian(TradeOff):
    """mu-GDP: the curve of telling N(0, 1) from N(mu, 1); mu is sensitivity over noise.

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
        # delta(eps) <= Phi(mu/2 - eps/mu), so this is not below the answer
        high = parameter * (parameter / 2 - float(special.ndtri(delta)))
        # as a share of that, which the search's own limits do not cut off
        return high * last_true(lambda part: self.delta(parameter, part * high) > delta, 1.0, tolerance=1e-12)

    def delta(self, parameter: float, epsilon: float) -> float:
        """The delta at ``epsilon``; in logarithms, so that neither factor overflows."""
        if math.isinf(parameter):
            return 1.0
        upper = float(special.log_ndtr(parameter / 2 - epsilon / parameter))
        lower = float(special.log_ndtr(-parameter / 2 - epsilon / parameter))
        return math.exp(upper) * -math.expm1(min(epsilon + lower - upper, 0.0))

    def balanced_error(self, parameter: float) -> float:
        return float(special.ndtr(-parameter / 2))

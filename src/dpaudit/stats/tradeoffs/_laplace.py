"""The Laplace mechanism."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpaudit.stats._types import FloatArray, at_least_zero
from dpaudit.stats.tradeoffs._base import TradeOff

__all__ = ["Laplace"]


@dataclass(frozen=True)
class Laplace(TradeOff):
    """The curve of telling Laplace(0, 1) from Laplace(eps, 1); eps is sensitivity over scale.

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
        return "the mechanism's trade-off curve is the Laplace mechanism's"

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
            # where the larger rate is above 1/2 the curve is a line, below it a hyperbola
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

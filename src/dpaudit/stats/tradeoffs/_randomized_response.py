"""Randomised response over k values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpaudit import _validate
from dpaudit.stats._types import FloatArray, at_least_zero
from dpaudit.stats.tradeoffs._base import TradeOff

__all__ = ["RandomizedResponse"]


@dataclass(frozen=True)
class RandomizedResponse(TradeOff):
    """Tell the truth with probability e^eps / (e^eps + k - 1), else one of the other k - 1 values.

    >>> RandomizedResponse().epsilon(1.0, 0.0)
    1.0
    """

    num_values: int = 2

    def __post_init__(self) -> None:
        _validate.whole("num_values", self.num_values, low=2)

    @property
    def symbol(self) -> str:
        return "epsilon"

    def assumption(self, delta: float) -> str | None:
        del delta
        return f"the mechanism is randomised response over {self.num_values} values"

    def _log_lie(self, parameter: float) -> float:
        """Ln of the probability of one given wrong value."""
        return -float(np.logaddexp(parameter, math.log(self.num_values - 1)))

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        rate = np.asarray(fpr, dtype=np.float64)
        lie = math.exp(self._log_lie(parameter))
        neither = (self.num_values - 2) * lie
        with np.errstate(divide="ignore", over="ignore"):
            steep = 1 - np.exp(parameter + np.log(rate))
        # between the two values the k - 2 others tell nothing: there the slope is -1
        blind = lie + neither + lie - rate
        flat = np.exp(-parameter) * (1 - rate)
        return at_least_zero(np.maximum(np.maximum(steep, blind), flat))

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        small, large = np.minimum(fpr, fnr), np.maximum(fpr, fnr)
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.log1p(-large) - np.log(small)
            # k lies' worth of errors: k e^lie = fpr + fnr, so e^eps = k / (fpr + fnr) - (k - 1)
            middle = np.log(np.maximum(self.num_values / (small + large) - self.num_values + 1, 0))
        best = np.fmax(ends, middle) if self.num_values > 2 else ends
        return at_least_zero(best)

    def epsilon(self, parameter: float, delta: float) -> float:
        # delta(eps) = truth - e^eps lie
        log_lie = self._log_lie(parameter)
        kept = math.exp(parameter + log_lie) - delta
        return max(math.log(kept) - log_lie, 0.0) if kept > 0 else 0.0

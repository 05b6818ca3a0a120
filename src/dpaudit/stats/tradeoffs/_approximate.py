"""(eps, delta)-DP and pure eps-DP: what a privacy statement says when it names no mechanism."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dpaudit import _validate
from dpaudit.stats._types import FloatArray, at_least_zero
from dpaudit.stats.tradeoffs._base import TradeOff, ratio_epsilon

__all__ = ["ApproximateDP", "PureDP", "approximate_fnr"]


def approximate_fnr(epsilon: float | FloatArray, delta: float | FloatArray, fpr: FloatArray) -> FloatArray:
    """max(0, 1 - delta - e^eps fpr, e^-eps (1 - delta - fpr)) without overflow for any eps."""
    with np.errstate(divide="ignore", over="ignore"):
        steep = 1 - delta - np.exp(epsilon + np.log(fpr))
    flat = np.exp(-np.asarray(epsilon)) * (1 - delta - fpr)
    return at_least_zero(np.maximum(steep, flat))


@dataclass(frozen=True)
class ApproximateDP(TradeOff):
    """(eps, delta)-DP at the question's delta: no assumption on the mechanism.

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


@dataclass(frozen=True)
class PureDP(TradeOff):
    """Pure eps-DP. At delta = 0 it assumes nothing; above, that the curve is eps-DP's own.

    That curve is randomised response's: at delta > 0 its epsilon is ln(e^eps - delta (1 + e^eps)).
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
        kept = 1 - delta * (1 + math.exp(-parameter))
        return max(parameter + math.log(kept), 0.0) if kept > 0 else 0.0

    def balanced_error(self, parameter: float) -> float:
        return math.exp(-np.logaddexp(0.0, parameter))

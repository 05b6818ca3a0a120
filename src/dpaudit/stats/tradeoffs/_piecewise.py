"""Trade-off curves made of lines, each of them an (eps, delta) guarantee.

Those of (eps, delta)-DP and pure eps-DP, for privacy claims that name no mechanism, of randomized response
over k values, and of several guarantees together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.errors import InputError
from dpaudit.stats.tradeoffs._families import (
    GAUSSIAN_NOISE,
    LAPLACE_NOISE,
    Attack,
    Gaussian,
    Laplace,
    TradeOff,
    at_least_zero,
    gaussian_attack,
)

_Point = tuple[float, float]
_BLOCK = 4096  # error rates processed at once: keeps the rates x lines table to a few dozen megabytes


def ratio_epsilon(fpr: FloatArray, fnr: FloatArray, delta: float | FloatArray) -> FloatArray:
    """Return the largest epsilon of (eps, delta)-DP that these error rates refute, in either direction.

    Paper, section 2.3: the maximum of ln((1 - delta - fpr) / fnr) and ln((1 - delta - fnr) / fpr).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.log(np.maximum(1 - delta - fnr, 0)) - np.log(fpr)
        other = np.log(np.maximum(1 - delta - fpr, 0)) - np.log(fnr)
    return at_least_zero(np.fmax(log_ratio, other))


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


@dataclass(frozen=True)
class PiecewiseLinear(TradeOff):
    """The curve implied by several (eps, delta) guarantees together: the maximum of their lines.

    The family's parameter is 1 for the curve as given. Below 1 it multiplies all epsilons; above 1 the
    excess is added to them (no factor, however large, would move a (0, delta) line).

    >>> curve = PiecewiseLinear(epsilons=(0.5, 2.0), deltas=(0.1, 1e-5))
    >>> round(float(curve.fnr(1.0, 0.2)), 4), curve.epsilon(1.0, 1e-5)
    (0.5703, 2.0)
    """

    symbol: ClassVar[str] = "curve parameter"
    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    _eps: FloatArray = field(init=False, repr=False, compare=False)
    _del: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        eps, dels = (np.asarray(v, dtype=np.float64) for v in (self.epsilons, self.deltas))
        if eps.ndim != 1 or eps.shape != dels.shape or not eps.size:
            raise InputError(
                f"epsilons and deltas must be non-empty and of the same length, got {eps.size} and "
                f"{dels.size}."
            )
        if not ((eps >= 0) & np.isfinite(eps)).all() or not ((dels >= 0) & (dels <= 1)).all():
            raise InputError("epsilons must be finite and at least 0, and deltas between 0 and 1.")
        for name, value in (("_eps", eps), ("_del", dels)):
            object.__setattr__(self, name, value)
        for name, value in (("epsilons", eps), ("deltas", dels)):
            object.__setattr__(self, name, tuple(value.tolist()))

    def _scaled(self, parameter: float) -> FloatArray:
        return min(parameter, 1.0) * self._eps + max(parameter - 1.0, 0.0)

    def __repr__(self) -> str:
        if len(self.epsilons) <= 8:
            return f"PiecewiseLinear(epsilons={self.epsilons}, deltas={self.deltas})"
        return f"PiecewiseLinear({len(self.epsilons)} lines)"

    def assumption(self, delta: float) -> str | None:
        del delta
        return "the mechanism's trade-off curve is the given one, with its epsilons scaled or shifted"

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        rate = np.asarray(fpr, dtype=np.float64)
        flat, eps = rate.reshape(-1), self._scaled(parameter)
        out = np.empty_like(flat)
        for start in range(0, flat.size, _BLOCK):
            piece = flat[start : start + _BLOCK, None]
            out[start : start + _BLOCK] = approximate_fnr(eps, self._del, piece).max(axis=1)
        return out.reshape(rate.shape)

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        first, second = np.broadcast_arrays(fpr, fnr)
        best = np.zeros(first.shape)
        for eps, delta in zip(self._eps, self._del, strict=True):
            refuted = ratio_epsilon(first, second, float(delta))
            below = refuted / eps if eps > 0 else np.zeros(())
            np.maximum(best, np.where(refuted > eps, 1 + refuted - eps, below), out=best)
        return best

    def epsilon(self, parameter: float, delta: float) -> float:
        """Return epsilon from the lower hull, over e^eps, of the guarantees and their mirror images."""
        slopes, hull = _profile(self._scaled(parameter), self._del)
        if delta >= hull[0]:
            return 0.0
        if delta < hull[-1]:
            return math.inf
        index = int(np.flatnonzero(hull <= delta)[0])
        share = (hull[index - 1] - delta) / (hull[index - 1] - hull[index])
        low, high = slopes[index - 1], slopes[index]
        with np.errstate(divide="ignore"):
            return float(max(np.logaddexp(np.log1p(-share) + low, np.log(share) + high), 0.0))


def _profile(eps: FloatArray, deltas: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the tightest profile from slope 1 up: log slopes and deltas, linear in e^eps in between."""
    mirrored = 1 - np.exp(-eps) * (1 - deltas)
    logs, values = lower_hull(np.concatenate([eps, -eps]), np.concatenate([deltas, mirrored])).T
    start = np.interp(1.0, np.exp(np.minimum(logs, 700.0)), values)
    keep = logs > 0
    return np.concatenate([[0.0], logs[keep]]), np.concatenate([[float(start)], values[keep]])


def lower_hull(epsilons: FloatArray, deltas: FloatArray) -> FloatArray:
    """Return the (eps, delta) pairs on the lower convex hull over e^eps, in order; the others add nothing.

    >>> lower_hull(np.array([2.0, 0.0, 1.0]), np.array([0.0, 0.3, 0.29]))
    array([[0. , 0.3],
           [2. , 0. ]])
    """
    order = np.lexsort((deltas, epsilons))
    if _is_hull(epsilons[order], deltas[order]):
        return np.stack([epsilons[order], deltas[order]], axis=1)
    points: list[_Point] = []
    for point in zip(epsilons[order].tolist(), deltas[order].tolist(), strict=True):
        if points and point[1] >= points[-1][1]:  # delta never increases with epsilon
            continue
        while len(points) > 1 and _is_above(points[-2], points[-1], point):
            points.pop()
        points.append(point)
    return np.asarray(points)


def _is_hull(eps: FloatArray, deltas: FloatArray) -> bool:
    """Return whether all points are below the chords between their neighbors, which is usual."""
    if eps.size < 3 or not (np.diff(deltas) < 0).all() or not (np.diff(eps) > 0).all():
        return False
    left, middle, right = eps[:-2], eps[1:-1], eps[2:]
    with np.errstate(under="ignore"):
        share = np.exp(middle - right) * np.expm1(left - middle) / np.expm1(left - right)
    return bool((deltas[1:-1] - deltas[:-2] < (deltas[2:] - deltas[:-2]) * share).all())


def _is_above(left: _Point, middle: _Point, right: _Point) -> bool:
    """Return whether a point is on or above the chord between its neighbors, over e^eps."""
    # (e^middle - e^left) / (e^right - e^left) without overflow
    share = math.exp(middle[0] - right[0]) * math.expm1(left[0] - middle[0]) / math.expm1(left[0] - right[0])
    return middle[1] - left[1] >= (right[1] - left[1]) * share

"""The epsilon of a whole training run from the mu of one step, in milliseconds after the first call.

The accountant is called at a few nodes. Between them, ln(epsilon) is interpolated by a cubic with an error
estimate, and the result is rounded down by more than that estimate.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.accounting._pld import epsilon_above, epsilon_below, epsilon_near
from dpaudit.errors import InputError
from dpaudit.stats.rootfinding import MonotonePredicate, last_positive, last_true

# Nodes of the table are 1/24 apart in ln(mu). Cubics use every fourth node, or every second or every node
# where epsilon bends. The error estimate of the cubic is subtracted. Only the cells that are queried are
# computed: an audit queries one to five.
_NODES_PER_UNIT = 24
_NEAR = 3e-4  # the expected error in mu of the fast accountant; a larger error only costs time


def training_epsilon(mu: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return a lower bound on the epsilon at ``delta`` of DP-SGD with noise multiplier 1 / ``mu``.

    The first call near a mu takes up to seconds; later calls near it take microseconds.
    Where epsilon has a kink, the accountant is called every time.
    """
    if not mu >= 0:
        raise InputError(f"Expected mu={mu:g} in [0, inf].")
    rate, steps = _validate.sample_rate(sample_rate), _validate.num_steps(num_steps)
    if mu == 0:
        return 0.0
    if _validate.delta(delta) == 0 or math.isinf(mu):
        return math.inf
    # the epsilon of mu = 100 is a lower bound for all larger ones
    epsilon = _table(rate, steps, delta).epsilon(min(mu, 100.0))
    if math.isnan(epsilon):
        raise InputError(
            f"Expected a delta at which the epsilon of a bound can be computed, got delta={delta:g} for "
            f"sample_rate={rate:g} and num_steps={steps}: choose a larger delta."
        )
    return epsilon


def noise_for_epsilon(epsilon: float, *, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return the smallest noise multiplier for which DP-SGD has at most this epsilon at ``delta``.

    >>> noise = noise_for_epsilon(8.0, sample_rate=0.01, num_steps=100, delta=1e-5)
    >>> round(noise, 3)
    0.465
    """
    _validate.positive("epsilon", epsilon)
    rate, steps = _validate.sample_rate(sample_rate), _validate.num_steps(num_steps)
    if _validate.delta(delta) == 0:
        raise InputError("Expected delta > 0, got delta=0: Gaussian noise has no finite epsilon at delta=0.")
    is_private = MonotonePredicate(lambda m: epsilon_above(1 / m, rate, steps, delta) <= epsilon)
    # a fast accountant locates the region in which the exact one decides
    near = last_positive(
        lambda m: math.log(epsilon / max(epsilon_near(1 / m, rate, steps, delta), 1e-300)),
        _limit_guess(epsilon, rate, steps),
        _NEAR,
    )
    if near == 0:
        raise InputError(f"Expected an epsilon that training with noise can have, got epsilon={epsilon:g}.")
    for mu in (near * (1 - _NEAR), near * (1 + _NEAR)):
        is_private(mu)
    return 1 / last_true(is_private, 0.5, tolerance=1e-4)


def _limit_guess(epsilon: float, sample_rate: float, num_steps: int) -> float:
    """Return mu of a step by the central limit theorem, with epsilon = mu^2 / 2 + 4 mu for the total mu."""
    total = math.sqrt(16 + 2 * epsilon) - 4
    return math.sqrt(math.log1p((total / sample_rate) ** 2 / num_steps))


@lru_cache(maxsize=64)
def _table(sample_rate: float, num_steps: int, delta: float) -> _EpsilonTable:
    return _EpsilonTable(sample_rate, num_steps, delta)


class _EpsilonTable:
    """ln(epsilon) on a lattice of ln(mu), computed where queried and finer where it bends."""

    def __init__(self, sample_rate: float, num_steps: int, delta: float) -> None:
        self._setting = sample_rate, num_steps, delta
        self._known: dict[int, float] = {}

    def epsilon(self, mu: float) -> float:
        position = math.log(mu) * _NODES_PER_UNIT
        for stride in (4, 2, 1):
            first = _first_node(position, stride)
            values = self._smooth_values(first, stride)
            if values is not None:
                best, off = cubic(np.log(values[1:5]), np.asarray((position - first) / stride - 1))
                # more than the error of a cubic through values as smooth as these
                return math.exp(float(best - off)) * (1 - 1e-4)
        return self._exact(mu)

    def _smooth_values(self, first: int, stride: int) -> FloatArray | None:
        """Return six neighboring values; None if no cubic fits, because of a kink, a zero or a NaN."""
        values = np.asarray([self._at(first + i * stride) for i in range(6)])
        # at this third difference of ln(epsilon), the cubic is off by less than 1e-4
        if values.min() > 0 and np.abs(np.diff(np.log(values), 3)).max() <= 0.012:  # not if one is NaN
            return values
        return None

    def _at(self, index: int) -> float:
        if index not in self._known:
            self._known[index] = self._exact(math.exp(index / _NODES_PER_UNIT))
        return self._known[index]

    def _exact(self, mu: float) -> float:
        return epsilon_below(1 / mu, *self._setting)


def _first_node(position: float, stride: int) -> int:
    """Return the first of the six neighbors whose middle two enclose the position."""
    return (math.floor(position / stride) - 2) * stride


def cubic(values: FloatArray, at: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the cubic through the four values (or rows) at 0, 1, 2, 3, and an estimate of its error.

    The error is less than the difference to the parabolas through three of the four points, if the function
    is smooth on the scale of the lattice.
    """
    first, second, third = values[1] - values[0], *(_difference(values, order) for order in (2, 3))
    best = values[0] + at * (first + (at - 1) / 2 * (second + (at - 2) / 3 * third))
    # a parabola and the cubic differ by the cubic term, which vanishes at the three points of the parabola
    return best, np.abs(third * (at - 1) * (at - 2)) / 6 * np.maximum(np.abs(at), np.abs(at - 3))


def _difference(values: FloatArray, order: int) -> FloatArray:
    """Return the first forward difference of an order of at least 2."""
    return np.asarray(np.diff(values[: order + 1], order, axis=0)[0])

"""The epsilon of a whole training from the mu of a step, in milliseconds after the first call.

The accountant is called at few nodes; between them ln(epsilon) is interpolated by a cubic whose error is
estimated, and the result is rounded down by more than that.
"""

from __future__ import annotations

import math
import time
from functools import lru_cache

import numpy as np

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.accounting._pld import epsilon_above, epsilon_below, epsilon_near
from dpaudit.errors import InputError
from dpaudit.stats._rootfinding import MonotonePredicate, last_positive, last_true

# Nodes of the table are 1/24 of ln(mu) apart. Cubics run through every fourth of them, and through every
# second or every one where epsilon bends. The error estimate of the cubic is subtracted. An audit queries one
# or two cells, and only those are computed. After more queries, all from a fifth to twice the first mu are.
_NODES_PER_UNIT = 24
_STRIDES = 4, 2, 1
_BELOW, _ABOVE = 10, 5  # in the widest strides
_MANY = 3  # cells that were queried
_PREFETCH_TIME = 15.0  # seconds
_SAFETY = 1e-4
_SMOOTH = 0.012  # third differences of ln(epsilon) up to here: then the cubic is off by less than 1e-4
_NEAR = 3e-4  # how far the quick accountant may be off, on mu: else it only takes longer
_LEAST = 1e-300
_LEAKIEST = 100.0  # the epsilon of this mu stands for all above it, which have more


def training_epsilon(mu: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return epsilon at ``delta`` of ``num_steps`` Poisson-sampled Gaussian steps of 1/noise = ``mu``.

    Not above the truth. The first calls build a table (seconds); the next take microseconds, as long as
    mu is near the first one. Where epsilon has a kink the accountant is called each time.
    """
    if not mu >= 0:
        raise InputError(f"Expected mu={mu:g} in [0, inf].")
    rate, steps = _validate.sample_rate(sample_rate), _validate.num_steps(num_steps)
    if mu == 0:
        return 0.0
    if _validate.delta(delta) == 0 or math.isinf(mu):
        return math.inf
    return _table(rate, steps, delta).epsilon(min(mu, _LEAKIEST))


def noise_for_epsilon(epsilon: float, *, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return the least noise multiplier whose training has at most this epsilon at ``delta``.

    >>> noise = noise_for_epsilon(8.0, sample_rate=0.01, num_steps=100, delta=1e-5)
    >>> round(noise, 3)
    0.465
    """
    _validate.positive("epsilon", epsilon)
    rate, steps = _validate.sample_rate(sample_rate), _validate.num_steps(num_steps)
    if _validate.delta(delta) == 0:
        raise InputError("Expected delta > 0: no Gaussian noise has a finite epsilon at delta=0.")
    is_private = MonotonePredicate(lambda m: epsilon_above(1 / m, rate, steps, delta) <= epsilon)
    # a quick accountant shows where to call the exact one, which decides
    near = last_positive(
        lambda m: math.log(epsilon / max(epsilon_near(1 / m, rate, steps, delta), _LEAST)),
        _limit_guess(epsilon, rate, steps),
        _NEAR,
    )
    for mu in (near * (1 - _NEAR), near * (1 + _NEAR)):
        is_private(mu)
    return 1 / last_true(is_private, 0.5, tolerance=1e-4)


def _limit_guess(epsilon: float, sample_rate: float, num_steps: int) -> float:
    """Return mu of a step by the central limit theorem; total mu of about epsilon = mu^2 / 2 + 4 mu."""
    total = math.sqrt(16 + 2 * epsilon) - 4
    return math.sqrt(math.log1p((total / sample_rate) ** 2 / num_steps))


@lru_cache(maxsize=64)
def _table(sample_rate: float, num_steps: int, delta: float) -> _EpsilonTable:
    return _EpsilonTable(sample_rate, num_steps, delta)


class _EpsilonTable:
    """ln(epsilon) at a lattice of ln(mu), computed where it is queried, finer where it bends."""

    def __init__(self, sample_rate: float, num_steps: int, delta: float) -> None:
        self._setting = sample_rate, num_steps, delta
        self._known: dict[int, float] = {}
        self._queried: dict[int, None] = {}  # cells, in this order

    def epsilon(self, mu: float) -> float:
        position = math.log(mu) * _NODES_PER_UNIT
        self._prefetch(math.floor(position / _STRIDES[0]))
        for stride in _STRIDES:
            first = _first_node(position, stride)
            values = self._smooth_values(first, stride)
            if values is not None:
                best, off = cubic(np.log(values[1:5]), np.asarray((position - first) / stride - 1))
                return math.exp(float(best - off)) * (1 - _SAFETY)
        return self._exact(mu)

    def _prefetch(self, cell: int) -> None:
        """Fill the cells around the first one, nearest first, once many were queried and while time lasts."""
        if cell in self._queried:
            return
        self._queried[cell] = None
        if len(self._queried) == _MANY:
            first, end = next(iter(self._queried)), time.monotonic() + _PREFETCH_TIME
            for near in sorted(range(-_BELOW, _ABOVE + 1), key=abs):
                self._fill((first + near) * _STRIDES[0], _STRIDES, end)

    def _fill(self, node: int, strides: tuple[int, ...], end: float) -> None:
        """Compute what a query between this node and the next of the first stride needs."""
        stride, *finer = strides
        if time.monotonic() >= end:
            return
        if self._smooth_values(_first_node(node, stride), stride) is None and finer:
            self._fill(node, tuple(finer), end)
            self._fill(node + finer[0], tuple(finer), end)

    def _smooth_values(self, first: int, stride: int) -> FloatArray | None:
        """Return six neighbours, if a cubic fits them: not where epsilon vanishes, nor at a kink."""
        values = np.asarray([self._at(first + i * stride) for i in range(6)])
        if values[0] <= 0 or np.abs(np.diff(np.log(values), 3)).max() > _SMOOTH:
            return None
        return values

    def _at(self, index: int) -> float:
        if index not in self._known:
            self._known[index] = self._exact(math.exp(index / _NODES_PER_UNIT))
        return self._known[index]

    def _exact(self, mu: float) -> float:
        return epsilon_below(1 / mu, *self._setting)


def _first_node(position: float, stride: int) -> int:
    """Return the first of the six neighbours whose middle two enclose the position."""
    return (math.floor(position / stride) - 2) * stride


def cubic(values: FloatArray, at: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the polynomial through the four values (or rows) at 0, 1, 2, 3, and how far it may be off.

    It is off by less than it differs from the parabolas through three of the four, as long as a step of
    the lattice is small against the bends of the function.
    """
    best = _lagrange(values, at, range(4))
    parabolas = [_lagrange(values, at, nodes) for nodes in (range(3), range(1, 4))]
    return best, np.maximum(*(np.abs(best - other) for other in parabolas))


def _lagrange(values: FloatArray, at: FloatArray, nodes: range) -> FloatArray:
    total = np.zeros_like(at)
    for i in nodes:
        others = [j for j in nodes if j != i]
        total += values[i] * np.prod([(at - j) / (i - j) for j in others], axis=0)
    return total

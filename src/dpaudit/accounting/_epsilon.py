"""The epsilon of a whole training from the mu of a step, in milliseconds after the first call.

The accountant is asked at few places; between them ln(epsilon) is interpolated by a cubic whose error is
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

# Places of the table are counted in 1/24 of ln(mu). Cubics run through every fourth of them, and through
# every second or every one where epsilon bends. What the cubic may be off is taken off. An audit asks in one
# or two places, and has only those computed. Who asks in more gets all from a fifth to twice the first mu.
_PLACES = 24
_STRIDES = 4, 2, 1
_BELOW, _ABOVE = 10, 5  # in the widest strides
_MANY = 3  # of them, in which somebody has asked
_PATIENCE = 15.0  # seconds
_SAFETY = 1e-4
_SMOOTH = 0.012  # third differences of ln(epsilon) up to here: then the cubic is off by less than 1e-4
_NEAR = 3e-4  # how far the quick accountant may be off, on mu: else it only takes longer
_LEAST = 1e-300
_LEAKIEST = 100.0  # the epsilon of this mu stands for all above it, which have more


def training_epsilon(mu: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return epsilon at ``delta`` of ``num_steps`` Poisson-sampled Gaussian steps of 1/noise = ``mu``.

    Not above the truth. The first calls build a table (seconds); the next take microseconds, as long as
    mu is near the first one. Where epsilon has a kink the accountant itself is asked each time.
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
    # an accountant that is quick and not exact says where to ask the exact one, which decides
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
def _table(sample_rate: float, num_steps: int, delta: float) -> _Table:
    return _Table(sample_rate, num_steps, delta)


class _Table:
    """ln(epsilon) at a lattice of ln(mu), grown where it is asked, finer where it bends."""

    def __init__(self, sample_rate: float, num_steps: int, delta: float) -> None:
        self._setting = sample_rate, num_steps, delta
        self._known: dict[int, float] = {}
        self._asked: dict[int, None] = {}  # in this order

    def epsilon(self, mu: float) -> float:
        place = math.log(mu) * _PLACES
        self._foresee(math.floor(place / _STRIDES[0]))
        for stride in _STRIDES:
            first = _first_node(place, stride)
            values = self._smooth_values(first, stride)
            if values is not None:
                best, off = cubic(np.log(values[1:5]), np.asarray((place - first) / stride - 1))
                return math.exp(float(best - off)) * (1 - _SAFETY)
        return self._exact(mu)

    def _foresee(self, cell: int) -> None:
        if cell not in self._asked:
            self._asked[cell] = None
            if len(self._asked) == _MANY:
                self._fill_around(next(iter(self._asked)))

    def _fill_around(self, cell: int) -> None:
        """Return in advance, nearest first. What patience leaves out is filled in when it is asked for."""
        end = time.monotonic() + _PATIENCE
        for near in sorted(range(-_BELOW, _ABOVE + 1), key=abs):
            self._fill((cell + near) * _STRIDES[0], _STRIDES, end)

    def _fill(self, place: int, strides: tuple[int, ...], end: float) -> None:
        """Return what a question between this place and the next of the first stride needs."""
        stride, *finer = strides
        if time.monotonic() >= end:
            return
        if self._smooth_values(_first_node(place, stride), stride) is None and finer:
            self._fill(place, tuple(finer), end)
            self._fill(place + finer[0], tuple(finer), end)

    def _smooth_values(self, first: int, stride: int) -> FloatArray | None:
        """Six neighbours, if a cubic follows them: not where epsilon vanishes or few steps begin to tell."""
        values = np.asarray([self._at(first + i * stride) for i in range(6)])
        if values[0] <= 0 or np.abs(np.diff(np.log(values), 3)).max() > _SMOOTH:
            return None
        return values

    def _at(self, index: int) -> float:
        if index not in self._known:
            self._known[index] = self._exact(math.exp(index / _PLACES))
        return self._known[index]

    def _exact(self, mu: float) -> float:
        return epsilon_below(1 / mu, *self._setting)


def _first_node(place: float, stride: int) -> int:
    """Return the first of the six neighbours whose middle two hold the place between them."""
    return (math.floor(place / stride) - 2) * stride


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

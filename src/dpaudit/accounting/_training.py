"""From a step to the whole training, in milliseconds after the first time."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpaudit import _validate
from dpaudit.accounting._cubic import cubic
from dpaudit.accounting._pld import epsilon_above, epsilon_below
from dpaudit.errors import InputError
from dpaudit.stats._search import last_true

__all__ = ["noise_for_epsilon", "training_epsilon"]

# Places of the table in ln(mu): a sixth apart, cubic between them, from a tenth to almost thrice the first
# mu that is asked for. What the cubic may be off is taken off.
_STEP = 1 / 6
_BELOW, _ABOVE = 14, 6
_SAFETY = 1e-4
_SMOOTH = 0.012  # third differences of ln(epsilon) up to here: then the cubic is off by less than 1e-4
_LEAKIEST = 100.0  # the epsilon of this mu stands for all above it, which have more


def training_epsilon(mu: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Epsilon at ``delta`` of ``num_steps`` Poisson-sampled Gaussian steps of 1/noise = ``mu``.

    Not above the truth. The first call builds a table (seconds); the next take microseconds,
    but a fraction of a second where epsilon bends and the accountant itself is asked.
    """
    if not mu >= 0:
        raise InputError(f"Expected mu={mu:g} in [0, inf].")
    rate, steps = _validate.sample_rate(sample_rate), _validate.whole("num_steps", num_steps)
    if mu == 0:
        return 0.0
    if _validate.delta(delta) == 0 or math.isinf(mu):
        return math.inf
    return _table(rate, steps, delta).epsilon(min(mu, _LEAKIEST))


@lru_cache(maxsize=64)
def _table(sample_rate: float, num_steps: int, delta: float) -> _Table:
    return _Table(sample_rate, num_steps, delta)


class _Table:
    """ln(epsilon) at a lattice of ln(mu), grown where it is asked."""

    def __init__(self, sample_rate: float, num_steps: int, delta: float) -> None:
        self._setting = sample_rate, num_steps, delta
        self._known: dict[int, float] = {}

    def epsilon(self, mu: float) -> float:
        place = math.log(mu) / _STEP
        first = math.floor(place) - 2
        if not self._known:
            for index in range(first - _BELOW, first + 6 + _ABOVE):
                self._at(index)
        values = np.asarray([self._at(first + i) for i in range(6)])
        # where epsilon vanishes or bends, as it does when few steps begin to tell, no polynomial follows it
        if values[0] <= 0 or np.abs(np.diff(np.log(values), 3)).max() > _SMOOTH:
            return self._exact(mu)
        best, off = cubic(np.log(values[1:5]), np.asarray(place - first - 1))
        return math.exp(float(best - off)) * (1 - _SAFETY)

    def _at(self, index: int) -> float:
        if index not in self._known:
            self._known[index] = self._exact(math.exp(index * _STEP))
        return self._known[index]

    def _exact(self, mu: float) -> float:
        return epsilon_below(1 / mu, *self._setting)


def noise_for_epsilon(epsilon: float, *, sample_rate: float, num_steps: int, delta: float) -> float:
    """The least noise multiplier whose training has at most this epsilon at ``delta``.

    >>> noise = noise_for_epsilon(8.0, sample_rate=0.01, num_steps=100, delta=1e-5)
    >>> round(noise, 3)
    0.465
    """
    _validate.positive("epsilon", epsilon)
    rate, steps = _validate.sample_rate(sample_rate), _validate.whole("num_steps", num_steps)
    if _validate.delta(delta) == 0:
        raise InputError("Expected delta > 0: no Gaussian noise has a finite epsilon at delta=0.")
    mu = last_true(lambda m: epsilon_above(1 / m, rate, steps, delta) <= epsilon, 0.5, tolerance=1e-4)
    return 1 / mu

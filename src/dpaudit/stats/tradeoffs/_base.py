"""The interface of a trade-off family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Self

import numpy as np

from dpaudit._types import ArrayLike, FloatArray
from dpaudit.stats._serialization import Serializable
from dpaudit.stats.rootfinding import last_true
from dpaudit.stats.tradeoffs._attack import Attack


class TradeOff(Serializable, ABC):
    """A one-parameter family of symmetric trade-off curves; a larger parameter means a larger leak.

    A curve bounds every attack on the mechanism: ``fnr >= curve(fpr)``. Symmetric means that exchanging
    the two error rates changes nothing, as for every mechanism under add-or-remove adjacency.
    """

    @property
    @abstractmethod
    def symbol(self) -> str:
        """The displayed name of the parameter, such as mu, epsilon or 1/noise_multiplier."""

    @property
    def is_inverse_noise(self) -> bool:
        """Whether the parameter is inversely proportional to the noise."""
        return False

    @abstractmethod
    def assumption(self, delta: float) -> str | None:
        """Return what a bound at ``delta`` assumes about the mechanism's curve; None if nothing."""

    @abstractmethod
    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        """Return the curve: the smallest fnr of any attack with this fpr."""

    @abstractmethod
    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        """Return the largest parameter whose curve lies above these error rates, 0 if there is none."""

    @abstractmethod
    def epsilon(self, parameter: float, delta: float) -> float:
        """Return the epsilon at ``delta`` of a mechanism with this parameter, rounded down."""

    def at(self, delta: float) -> Self:
        """Return the family for a query at ``delta``; only (eps, delta)-DP depends on it."""
        del delta
        return self

    def with_epsilon(self, epsilon: float, delta: float) -> float:
        """Return the parameter of the mechanism whose epsilon at ``delta`` is ``epsilon``."""
        return last_true(lambda p: self.epsilon(p, delta) <= epsilon, tolerance=1e-9)

    def balanced_error(self, parameter: float) -> float:
        """Return the smallest (fpr + fnr) / 2 of any attack: (1 - total variation) / 2.

        A symmetric curve attains it where fpr and fnr are equal.
        """
        low, high = 0.0, 0.5
        for _ in range(60):
            middle = (low + high) / 2
            above = float(self.fnr(parameter, np.asarray(middle))) > middle
            low, high = (middle, high) if above else (low, middle)
        return low

    @property
    def attacked_mechanism(self) -> str | None:
        """The mechanism for which power is stated, if it does not follow from the curve."""
        return None

    def attack(self, parameter: float, delta: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
        """Return the attack for which power is stated; by default it attains the curve.

        ``lengths`` are equally frequent lengths of canaries, in units of the sensitivity: a short canary
        reveals less, if the parameter is inversely proportional to noise.
        """
        del delta
        length = float(np.mean(lengths)) if self.is_inverse_noise else 1.0
        return Attack(partial(self.fnr, length * parameter))

    def from_balanced_error(self, error: float) -> float:
        """Return the largest parameter whose smallest balanced error is above ``error``."""
        rate = np.asarray(error, dtype=np.float64)
        return float(self.parameter(rate, rate))


def ratio_epsilon(fpr: FloatArray, fnr: FloatArray, delta: float | FloatArray) -> FloatArray:
    """Return the largest epsilon of (eps, delta)-DP that these error rates refute, in either direction.

    Paper, section 2.3: the maximum of ln((1 - delta - fpr) / fnr) and ln((1 - delta - fnr) / fpr).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.log(np.maximum(1 - delta - fnr, 0)) - np.log(fpr)
        other = np.log(np.maximum(1 - delta - fpr, 0)) - np.log(fnr)
    return at_least_zero(np.fmax(log_ratio, other))


def at_least_zero(values: ArrayLike) -> FloatArray:
    """Return the values, with 0 where they are negative or undefined (0/0 and inf - inf)."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(array > 0, array, 0.0)

"""Privacy loss distributions of subsampled Gaussian steps and of their compositions, as arrays.

The numbers are those of dp-accounting, with which tests compare them. dp-accounting visits every loss in a
Python loop, and its import alone takes longer than an audit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from dpaudit._types import FloatArray

_TAIL = float(special.ndtri(0.5 * math.exp(-50)))  # where dp-accounting truncates the noise of a step
_RISING = 1e-7  # by how much deltas may rise: more than their rounding errors
_TRUNCATED = 1e-15  # mass outside of a composition, as in dp-accounting
# orders of the moments that bound it: dp-accounting's, and larger ones for a sum that is narrow
_ORDERS = np.concatenate([np.arange(1, 21), np.arange(24, 164, 4)])
_BLOCK = 128  # losses in a row of the matrix of which moments are computed
_MOST_LOSSES = 1_000_000
_MOST_EXPONENT = 700.0


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """Probabilities of the losses ``interval`` x (``first``, ``first`` + 1, ...) and of an infinite one.

    Rounding is pessimistic: deltas and epsilons are upper bounds.
    """

    interval: float
    first: int
    probs: FloatArray
    infinity: float

    @classmethod
    def of_step(
        cls, noise: float, sample_rate: float, interval: float, *, is_removed: bool
    ) -> LossDistribution:
        """Return the distribution of a subsampled Gaussian step, if an example is removed or added.

        Raise an ``ArithmeticError`` or a ``ValueError`` if losses overflow or if there are too many.
        """
        low, high = _loss_range(noise, sample_rate, is_removed=is_removed)
        first, last = math.floor(low / interval), math.ceil(high / interval)
        _require_size(last - first)
        epsilons = np.arange(first, last + 1, dtype=np.float64) * interval
        deltas = _step_deltas(noise, sample_rate, epsilons, is_removed=is_removed)
        if (np.diff(deltas) > _RISING).any():
            raise ValueError("rounding errors are too large")
        deltas = np.minimum.accumulate(deltas)
        return cls(interval, first, _connect_dots(deltas, interval), float(deltas[-1]))

    def repeated(self, num_steps: int) -> LossDistribution:
        """Return the distribution of the sum of the losses of ``num_steps`` steps."""
        if num_steps == 1:
            return self
        first, last = _sum_range(self.probs, num_steps)
        _require_size(last - first)
        size = fft.next_fast_len(max(last - first + 1, self.probs.size), real=True)
        wrapped = fft.irfft(power(fft.rfft(self.probs, size), num_steps), size)
        total = np.roll(wrapped, -first)[: last - first + 1]
        infinity = _TRUNCATED - math.expm1(num_steps * math.log1p(-self.infinity))
        return LossDistribution(self.interval, self.first * num_steps + first, total, infinity)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon, at least 0, at which delta is at most ``delta``; infinity if none is.

        That is ln((U - delta) / L), with the mass U of the losses above epsilon and the sum L of their masses
        times e^-loss.
        """
        if self.infinity > delta:
            return math.inf
        losses, probs = self._descending(0.0)
        upper = np.cumsum(np.concatenate([[self.infinity], probs]))
        exceeds = upper > delta
        if not exceeds.any():
            return 0.0
        # a little more than epsilon; e^-loss, which may underflow, is computed relative to it
        near = losses[max(int(exceeds.argmax()) - 1, 0)]
        weights = np.exp(np.minimum(near - losses, _MOST_EXPONENT))
        lower = np.cumsum(np.concatenate([[0.0], probs * weights]))
        excess = upper - delta
        # the first losses are above epsilon; if all are, that is the last value
        reached = exceeds[:-1] & (lower[:-1] > 0) & (excess[:-1] * weights >= lower[:-1])
        at = int(reached.argmax()) if reached.any() else losses.size
        if not excess[at] > 0:
            return 0.0
        return max(float(near) + math.log(excess[at]) - math.log(lower[at]), 0.0)

    def deltas(self, epsilons: FloatArray) -> FloatArray:
        """Return delta at each epsilon, in ascending order.

        Rounding errors could make them slightly smaller than the probability of an infinite loss, and
        negative. They are raised to it, which keeps them upper bounds.
        """
        losses, probs = self._descending(float(epsilons[0]))
        weights = np.stack([probs, probs * np.exp(-losses)])
        sums = np.concatenate([[[self.infinity], [0.0]], weights], axis=1).cumsum(axis=1)
        upper, lower = sums[:, losses.size - np.searchsorted(losses[::-1], epsilons, side="right")]
        return np.asarray(np.clip(upper - np.exp(epsilons) * lower, self.infinity, 1.0))

    def _descending(self, least: float) -> tuple[FloatArray, FloatArray]:
        """Return the losses from about ``least`` on, the largest first, and their probabilities."""
        start = max(math.floor(least / self.interval) - self.first, 0)
        losses = (np.arange(start, self.probs.size, dtype=np.float64) + self.first) * self.interval
        return losses[::-1], self.probs[start:][::-1]


def _require_size(num_losses: int) -> None:
    if num_losses > _MOST_LOSSES:  # of a tiny sample rate, whose losses are tiny too
        raise ValueError("too many losses for the memory")


def _loss_range(noise: float, sample_rate: float, *, is_removed: bool) -> tuple[float, float]:
    """Return the losses between which dp-accounting's "connect the dots" has its dots."""
    sign = 1.0 if is_removed else -1.0
    ends = (_TAIL * noise - 1, -_TAIL * noise) if is_removed else (_TAIL * noise, 1 - _TAIL * noise)
    exponents = [(-sign * 0.5 - x) / noise**2 for x in ends]
    if sample_rate == 1:
        return exponents[1], exponents[0]
    shares = math.log(sample_rate), math.log1p(-sample_rate)
    high, low = (sign * float(np.logaddexp(shares[0] + sign * one, shares[1])) for one in exponents)
    return low, high


def _step_deltas(noise: float, sample_rate: float, epsilons: FloatArray, *, is_removed: bool) -> FloatArray:
    """Return delta of a subsampled Gaussian step at each epsilon, if an example is removed or added.

    With q the sample rate and D the delta of a step that includes the example for certain, delta is q D(c)
    at epsilon = ln(1 + q (e^c - 1)) if it is removed, and q e^(epsilon - c) D(c) at
    epsilon = -ln(1 + q (e^-c - 1)) if it is added. So rounding errors are small relative to q.
    """
    sign = 1.0 if is_removed else -1.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        certain = sign * _certain_loss(sign * epsilons, sample_rate)
        weights = sample_rate if is_removed else sample_rate * np.exp(epsilons - certain)
        deltas = weights * _gaussian_deltas(noise, certain)
    # up to ln(1 - q), or from -ln(1 - q) on, one distribution is above the other everywhere
    beyond = -np.expm1(np.minimum(epsilons, 0.0)) if is_removed else 0.0
    return np.clip(np.where(np.isfinite(certain), deltas, beyond), 0.0, 1.0)


def _certain_loss(epsilons: FloatArray, sample_rate: float) -> FloatArray:
    """Return ln(1 + (e^epsilon - 1) / q), not finite where that has no logarithm."""
    if sample_rate == 1:
        return epsilons
    small = np.minimum(epsilons, _MOST_EXPONENT / 2)
    return np.log1p(np.expm1(small) / sample_rate) + (epsilons - small)


def _gaussian_deltas(noise: float, epsilons: FloatArray) -> FloatArray:
    middle = -epsilons * noise
    # the second term in logarithms: e^epsilon may overflow
    without = np.exp(epsilons + special.log_ndtr(middle - 0.5 / noise))
    return np.asarray(special.ndtr(middle + 0.5 / noise) - without)


def _connect_dots(deltas: FloatArray, interval: float) -> FloatArray:
    """Return the masses at evenly spaced losses of the distribution that has these deltas, and more between.

    Doroshenko et al. 2022, https://arxiv.org/abs/2207.04380, Algorithm 1.
    """
    if deltas.size == 1:
        return 1 - deltas
    falls = -np.diff(deltas) / math.expm1(interval)
    probs = np.concatenate([[1 - deltas[0]], math.exp(interval) * falls])
    probs[:-1] -= falls
    return np.asarray(np.maximum(probs, 0.0))


def _sum_range(probs: FloatArray, num_steps: int) -> tuple[int, int]:
    """Return ends outside of which the sum of ``num_steps`` draws has a mass of at most 1e-15, by Chernoff.

    Orders are multiples of 1 / size. The moments are products of three matrices: masses in rows, growth
    within a row, and growth from row to row.
    """
    orders = np.concatenate([-_ORDERS, _ORDERS])[:, None] / probs.size
    length = min(_BLOCK, probs.size)
    num_rows = math.ceil(probs.size / length)
    rows = np.zeros((num_rows, length))
    rows.reshape(-1)[: probs.size] = probs
    within, between = (np.exp(orders * np.arange(n) * by) for n, by in ((length, 1), (num_rows, length)))
    moments = np.einsum("or,or->o", within @ rows.T, between)
    lower, upper = 0, (probs.size - 1) * num_steps
    for order, moment in zip(orders[:, 0].tolist(), moments.tolist(), strict=True):
        if not moment > 0:
            continue
        bound = (num_steps * math.log(moment) + math.log(2 / _TRUNCATED)) / order
        if order > 0:
            upper = min(upper, math.ceil(bound))
        else:
            lower = max(lower, math.floor(bound))
    return lower, upper


def power(values: npt.NDArray[np.complex128], exponent: int) -> npt.NDArray[np.complex128]:
    """Return the power by repeated squaring, in a tenth of the time of ``values**exponent``."""
    total, square = np.ones_like(values), values
    while True:
        if exponent % 2:
            total *= square
        exponent //= 2
        if not exponent:
            return total
        square = square * square

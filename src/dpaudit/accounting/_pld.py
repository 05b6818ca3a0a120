"""Privacy loss distributions and epsilons of DP-SGD, above or below the exact ones; curves of other events.

The numbers are those of dp-accounting, with which tests compare them. dp-accounting visits every loss in a
Python loop, and its import alone takes longer than an audit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from scipy import fft, special

from dpaudit._types import FloatArray
from dpaudit.accounting._tilted import LEAST_NOISE, ComplexArray, TiltedLosses
from dpaudit.errors import InputError
from dpaudit.stats.tradeoffs import PiecewiseLinear

_TAIL = float(special.ndtri(0.5 * math.exp(-50)))  # where dp-accounting truncates the noise of a step
_TRUNCATED = 1e-15  # mass outside of a composition, as in dp-accounting
# orders of the moments that bound it: dp-accounting's, and larger ones for a sum that is narrow
_ORDERS = np.concatenate([np.arange(1, 21), np.arange(24, 164, 4)])
_MOST_EXPONENT = 700.0
_TOLERABLE = 1e-2  # the largest relative error of delta by rounding


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """Probabilities of the losses ``interval`` x (``first``, ``first`` + 1, ...) and of an infinite one.

    Rounding is pessimistic: deltas and epsilons are upper bounds.
    """

    largest: ClassVar[float] = math.inf
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
        # more than the rounding errors of deltas
        if (np.diff(deltas) > 1e-7).any():
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
    if num_losses > 1_000_000:  # of a tiny sample rate, whose losses are tiny too
        raise ValueError("too many losses for the memory")


def _loss_range(noise: float, sample_rate: float, *, is_removed: bool) -> tuple[float, float]:
    """Return the losses between which dp-accounting's "connect the dots" has its dots."""
    sign = 1.0 if is_removed else -1.0
    ends = (_TAIL * noise - 1, -_TAIL * noise) if is_removed else (_TAIL * noise, 1 - _TAIL * noise)
    exponents = [(-sign * 0.5 - x) / noise**2 for x in ends]
    if sample_rate == 1:
        return exponents[1], exponents[0]
    shares = math.log(sample_rate), math.log1p(-sample_rate)
    high, low = (sign * float(np.logaddexp(shares[0] + sign * exponent, shares[1])) for exponent in exponents)
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
    length = min(128, probs.size)
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


def power(values: ComplexArray, exponent: int) -> ComplexArray:
    """Return the power by repeated squaring, in a tenth of the time of ``values**exponent``."""
    total, square = np.ones_like(values), values
    while True:
        if exponent % 2:
            total *= square
        exponent //= 2
        if not exponent:
            return total
        square = square * square


@lru_cache(maxsize=8)  # of up to 8 MB each
def _composed(
    noise: float, sample_rate: float, num_steps: int, finer: float, *, is_removed: bool
) -> LossDistribution | TiltedLosses:
    """Return the privacy losses of the whole training run, if an example is removed or added."""
    interval = _interval(noise, sample_rate, num_steps)
    if interval is not None:
        with suppress(ValueError, ArithmeticError):  # too many losses
            step = LossDistribution.of_step(noise, sample_rate, interval / finer, is_removed=is_removed)
            return step.repeated(num_steps)
    return TiltedLosses(noise, sample_rate, num_steps, is_removed)


def composed(
    noise: float, sample_rate: float, num_steps: int, finer: float = 1
) -> tuple[LossDistribution | TiltedLosses, ...]:
    """Return the privacy losses of the whole training run in both directions, or in one if they are equal."""
    directions = (True,) if sample_rate == 1 else (True, False)
    return tuple(
        _composed(noise, sample_rate, num_steps, finer, is_removed=is_removed) for is_removed in directions
    )


def _interval(noise_multiplier: float, sample_rate: float, num_steps: int) -> float | None:
    """Return the discretization interval: 1e-3, less for steps with small spread, more for a large epsilon.

    It is a twentieth of a step's spread or less, more if rounding errors do not allow for that, and None if
    even a fourth is too little. The error of dp-accounting's "connect the dots" grows with
    interval^2 x steps. Epsilon is estimated by the central limit theorem, or from the largest loss of a step
    if that is smaller.
    """
    mu = 1 / noise_multiplier
    loss = mu**2 / 2 + 10 * mu
    largest = num_steps * (loss + math.log(sample_rate + (1 - sample_rate) * math.exp(-loss)))
    total = sample_rate * math.sqrt(num_steps * math.expm1(min(mu**2, 100.0)))
    epsilon = min(total**2 / 2 + 4 * total, largest)
    spread = sample_rate * (mu + mu**2 / 2)  # about the standard deviation of the privacy loss of a step
    # rounding errors of delta become masses, of about 2e-16 / interval at each loss of each step; 4e-14 is
    # their sum over the mass that all steps may gain by it
    total_range = max(largest, 0.0) - num_steps * math.log1p(-min(sample_rate, 0.5))
    least = 2 * math.sqrt(4e-14 * total_range)
    interval = max(min(max(1e-3, epsilon * 6e-5), spread / 20), least)
    # with 4 to 5.5 intervals per spread, claims were off by up to 0.4 %, bounds by 0.8 %, curves by 1.6 %
    return interval if interval <= spread / 4 else None


@lru_cache(maxsize=4096)
def _epsilon(noise: float, sample_rate: float, num_steps: int, delta: float, finer: float) -> float:
    """Return an upper bound on epsilon, the larger one of both directions."""
    return _larger_epsilon(composed(noise, sample_rate, num_steps, finer), delta)


def _larger_epsilon(directions: Iterable[LossDistribution | TiltedLosses], delta: float) -> float:
    epsilon = 0.0
    for losses in directions:
        if losses.largest > epsilon:
            epsilon = max(epsilon, losses.epsilon(delta))
    return epsilon


@lru_cache(maxsize=4096)
def _removal_epsilon(noise: float, sample_rate: float, num_steps: int, delta: float, finer: float) -> float:
    """Return the same if an example is removed, which takes half of the time and is rarely smaller.

    It is infinity if there is no grid, or if its truncated tail has more mass than delta.
    """
    losses = _composed(noise, sample_rate, num_steps, finer, is_removed=True)
    return losses.epsilon(delta) if isinstance(losses, LossDistribution) else math.inf


def epsilon_above(noise: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return an upper bound on epsilon at ``delta``, for claims."""
    rounding = _rounding_of_delta(num_steps, delta)
    if rounding > _TOLERABLE * delta:
        both = (TiltedLosses(noise, sample_rate, num_steps, is_removed) for is_removed in (True, False))
        epsilon = _larger_epsilon(both, delta)
    else:
        epsilon = _epsilon(noise, sample_rate, num_steps, delta - rounding, 2)
    if math.isinf(epsilon):
        raise InputError(
            f"The claim has no epsilon that can be computed at delta={delta:g} for "
            f"noise_multiplier={noise:g}, sample_rate={sample_rate:g} and num_steps={num_steps}."
        )
    return epsilon


def _rounding_of_delta(num_steps: int, delta: float) -> float:
    """Return how far delta of a composition may be from the truth because of rounding; 0 if that is nothing.

    Transforms have an error of about the precision of a number in every step, and the tails that are folded
    back have the mass at which a composition is truncated. Compared with exact Gaussian compositions.
    """
    rounding = 4e-15 + 4.4e-16 * num_steps
    # a smaller relative error of delta changes epsilon by less than its own rounding
    return rounding if rounding > 1e-6 * delta else 0.0


def epsilon_near(noise: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return an approximate epsilon at ``delta``, for initial guesses."""
    return _epsilon(noise, sample_rate, num_steps, delta, 0.25)


def epsilon_below(noise: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return a lower bound on epsilon at ``delta``, NaN if none was found.

    The discretization errs upwards by an amount that falls to a quarter when the interval is halved. The
    truth is below the finer value by a third of the last improvement; here all of it is subtracted. One of
    the two directions is enough: epsilon is the larger one of both.
    """
    rounding = _rounding_of_delta(num_steps, delta)
    if rounding <= _TOLERABLE * delta:
        coarse = _removal_epsilon(noise, sample_rate, num_steps, delta + rounding, 1)
        fine = _removal_epsilon(noise, sample_rate, num_steps, delta + rounding, 2)
        if max(coarse, fine) < math.inf:
            # 1e-5 is the relative error of epsilon from truncating tails at delta = 1e-10
            return max(fine * (1 - 1e-5) - abs(coarse - fine), 0.0)
    # less noise has a larger epsilon
    tilted = TiltedLosses(max(noise, LEAST_NOISE), sample_rate, num_steps, is_removed=True)
    return tilted.epsilon_below(delta)


def event_curve(event: Any, delta: float) -> PiecewiseLinear:
    """Return the trade-off curve of a ``DpEvent`` from its PLD, including a line at ``delta``."""
    import dp_accounting  # noqa: PLC0415  # imported late: the import takes longer than the rest of dpaudit
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415

    if not isinstance(event, dp_accounting.DpEvent):
        raise InputError(f"event must be a dp_accounting.DpEvent, got {event!r}.")
    accountant = PLDAccountant()
    if not accountant.supports(event):
        raise InputError(f"event must be supported by dp-accounting's PLD accountant, got {event!r}.")
    accountant.compose(event)
    # each line costs a pass over the privacy loss distribution
    points = np.linspace(0.0, _largest_epsilon(accountant), 200)
    at_delta = _finite([accountant.get_epsilon(delta)])
    if not at_delta:
        raise InputError(f"event must have a finite epsilon at delta={delta:g}, got {event!r}.")
    epsilons = np.unique(np.append(points, at_delta))
    deltas = [accountant.get_delta(float(epsilon)) for epsilon in epsilons]
    return PiecewiseLinear(tuple(epsilons), tuple(np.clip(deltas, 0.0, 1.0)))


def _largest_epsilon(accountant: Any) -> float:
    """Return epsilon at the smallest delta with a finite one: 0 for bounded losses, else about 1e-12."""
    deltas = [0.0, *(10.0**-exponent for exponent in range(12, 0, -1))]
    epsilons = _finite(accountant.get_epsilon(delta) for delta in deltas)
    if not epsilons:
        raise InputError("event must have a finite epsilon at some delta up to 0.1.")
    return min(epsilons[0], 700.0)


def _finite(epsilons: Iterable[float]) -> list[float]:
    return [max(float(epsilon), 0.0) for epsilon in epsilons if np.isfinite(epsilon)]

"""Privacy loss distributions of subsampled Gaussian steps and of their compositions, as arrays.

The numbers are those of dp-accounting, with which tests compare them. dp-accounting visits every loss in a
Python loop, and its import alone takes longer than an audit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy import fft, special

from dpaudit._types import FloatArray
from dpaudit.accounting._log_ratios import ComplexArray, StepMoments, power
from dpaudit.stats.rootfinding import falling_root

_TAIL = float(special.ndtri(0.5 * math.exp(-50)))  # where dp-accounting truncates the noise of a step
_TRUNCATED = 1e-15  # mass outside of a composition, as in dp-accounting
# orders of the moments that bound it: dp-accounting's, and larger ones for a sum that is narrow
_ORDERS = np.concatenate([np.arange(1, 21), np.arange(24, 164, 4)])
_MOST_EXPONENT = 700.0
LEAST_NOISE = 0.05
"""The least noise multiplier of a contour; less needs seconds, then gigabytes, as 1 / noise^2."""
_PRECISION, _PRECISION_OF_EPSILON = 1e-15, 1e-10
_LEAST_EPSILON, _LARGEST_EPSILON = 1e-20, 1e9
_CONTOUR_DELTAS = 1e-12, 1e-9, 1e-6, 1e-4, 1e-2, 0.3


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


@dataclass(frozen=True, eq=False)
class _Contour:
    """Delta as a function of epsilon: the real part of a sum of e^(log_terms - points x epsilon)."""

    points: ComplexArray
    log_terms: ComplexArray
    precision: FloatArray  # relative errors of the terms by rounding
    other: _Contour | None = None  # half as many points of another path

    def terms(self, epsilons: FloatArray) -> ComplexArray:
        return np.asarray(np.exp(self.log_terms - np.multiply.outer(epsilons, self.points)))

    def deltas(self, epsilons: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return delta, its derivative, and a bound on the error of delta, at each epsilon.

        The integral is the same on every path, and the rule of trapezoids converges exponentially. So the
        difference to half as many points of another path is far more than the error.
        """
        terms = self.terms(epsilons)
        total, sizes = terms.real.sum(axis=-1), np.abs(terms)
        error = sizes @ self.precision + _PRECISION * epsilons * (sizes @ np.abs(self.points))
        error += len(self.points) * sizes[..., -1]
        if self.other is not None:
            error += np.abs(total - self.other.terms(epsilons).real.sum(axis=-1))
        return total, -(terms @ self.points).real, error

    def error(self, epsilon: float) -> float:
        return float(self.deltas(np.asarray(epsilon))[2])

    def epsilon(self, delta: float, start: float, most: float) -> float:
        """Return where delta has this value, at least 0 and at most ``most``."""
        low, high = (math.log(end) for end in (_LEAST_EPSILON, min(most, _LARGEST_EPSILON)))

        def excess(log_epsilon: float) -> tuple[float, float]:
            value, slope, _ = self.deltas(np.exp(log_epsilon))
            if not 0 < value < math.inf:  # terms overflow only far below the root
                return (-1.0 if value <= 0 else 1.0), 0.0
            return math.log(value / delta), float(slope / value * math.exp(log_epsilon))

        root = falling_root(excess, math.log(max(start, _LEAST_EPSILON)), low, high, _PRECISION_OF_EPSILON)
        return math.exp(root) if root > low + 1 else 0.0


@dataclass(frozen=True)
class TiltedLosses:
    """The sum of the losses of ``num_steps`` steps, by its moment generating function instead of masses.

    If K(s) is ln E[e^(s loss)] of T steps, delta is the integral of e^(K(s) - s epsilon) / (s (s + 1)) over s
    from c - i infinity to c + i infinity, over 2 pi i, for every c > 0. Near the saddle point c nothing
    cancels, however small delta is. The path bends to the right, where e^(-s epsilon) falls.
    """

    noise: float
    sample_rate: float
    num_steps: int
    is_removed: bool

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta``, the largest loss if no other was found."""
        return self._epsilon(delta, -1)

    def epsilon_below(self, delta: float) -> float:
        """Return a lower bound on epsilon at ``delta``, NaN if none was found."""
        return self._epsilon(delta, 1)

    @property
    def largest(self) -> float:
        """The largest possible loss."""
        if self.is_removed or self.sample_rate == 1:
            return math.inf
        return -self.num_steps * math.log1p(-self.sample_rate)

    def deltas(self, epsilons: FloatArray) -> FloatArray:
        """Return upper bounds on delta at each epsilon: the least of those of several contours."""
        bounds = [np.ones_like(epsilons)]
        with np.errstate(over="ignore", invalid="ignore"):  # far from the epsilon of a contour
            for delta in _CONTOUR_DELTAS if self.noise >= LEAST_NOISE else ():
                values, _, errors = self._contour(delta)[0].deltas(epsilons)
                bounds.append(np.maximum(values, 0.0) + errors)
        return np.minimum.accumulate(np.fmin.reduce(bounds))

    def _epsilon(self, delta: float, side: int) -> float:
        if self.noise < LEAST_NOISE:
            return self.largest if side < 0 else math.nan
        contour, near = self._contour(delta)
        with np.errstate(over="ignore", invalid="ignore"):
            error = 2 * contour.error(near)
            if not error < delta / 4:
                return self.largest if side < 0 else math.nan
            epsilon = contour.epsilon(delta + side * error, near, self.largest)
        return epsilon * (1 - side * 10 * _PRECISION_OF_EPSILON)

    @lru_cache(maxsize=64)  # noqa: B019  # equal runs share their contours
    def _contour(self, delta: float) -> tuple[_Contour, float]:
        """Return a contour for epsilons around that at ``delta``, and about that epsilon."""
        with np.errstate(over="ignore", invalid="ignore"):
            saddle, epsilon, spread = self._saddle(math.log(delta))
            probes = self._terms(saddle, np.arange(0.0, 25.0, 0.25))
            spacing = min(0.5 / math.sqrt(1 + spread), 1 / (saddle * self._moments(saddle).reach))
            for _ in range(12):
                end = _first_below(probes, epsilon, math.log(delta) - 25)
                size = 2 * math.ceil(end / spacing / 2)
                positions = np.linspace(0.0, end, size + 1)
                other = self._terms(0.9 * saddle, positions[::2])
                contour = replace(self._terms(saddle, positions), other=other)
                epsilon = contour.epsilon(delta, epsilon, self.largest)
                is_long_enough = _first_below(probes, epsilon, math.log(delta) - 20) <= end
                is_fine_enough = contour.error(epsilon) <= 1e-6 * delta
                if (is_long_enough and is_fine_enough) or size > (1 << 12):
                    break
                spacing /= 2 if is_long_enough else 1
        return contour, epsilon

    def _terms(self, saddle: float, positions: FloatArray) -> _Contour:
        """Return the terms at s = saddle (1 + i sinh(position) + bend (cosh(position) - 1))."""
        moments = self._moments(saddle)
        # slope of the path over that of the path of the noise, measured against integrals with 30 digits
        bend = 0.4 * moments.rise if self.is_removed else 0.0
        points = saddle * (1 + 1j * np.sinh(positions) + bend * (np.cosh(positions) - 1))
        direction = saddle * (np.cosh(positions) - 1j * bend * np.sinh(positions))
        logs = moments.logs(1 + points) if self.is_removed else moments.logs(-points.conj()).conj()
        weights = np.full(positions.size, np.diff(positions[:2])[0] / math.pi)
        weights[0] /= 2
        log_terms = self.num_steps * logs + np.log(weights * direction / (points * (1 + points)))
        precision = _PRECISION * (1 + self.num_steps * np.abs(1 + points) * moments.mean_size)
        return _Contour(points, log_terms, precision)

    def _moments(self, saddle: float) -> StepMoments:
        order = 1 + saddle if self.is_removed else -saddle
        return StepMoments.of(self.noise, self.sample_rate, self.num_steps, order)

    def _saddle(self, log_delta: float) -> tuple[float, float, float]:
        """Return a point near the saddle, epsilon there, and the spread of the terms around it."""
        at, factor, best = 1e-6, 4.0, (0.0, 0.0)
        while factor > 1.02:
            candidate = self._saddle_delta(at * factor)
            if candidate[0] >= log_delta:
                at, best = at * factor, candidate[1:]
            else:
                factor = math.sqrt(factor)
        return at, max(best[0], 0.0), best[1]

    def _saddle_delta(self, saddle: float) -> tuple[float, float, float]:
        """Return about ln(delta) at the epsilon with this saddle point, epsilon, and the spread."""
        moments = self._moments(saddle)
        value, first, second = moments.derivatives()
        mean = self.num_steps * (first if self.is_removed else -first)
        epsilon = mean - 1 / saddle - 1 / (1 + saddle)
        curvature = self.num_steps * second + saddle**-2 + (1 + saddle) ** -2
        # beyond this phase of the terms, a smaller saddle point needs fewer points
        if not (curvature > 0 and math.isfinite(epsilon) and saddle * moments.reach < 500.0):
            return -math.inf, 0.0, 0.0
        log_delta = self.num_steps * value - saddle * epsilon - math.log(saddle * (1 + saddle))
        return log_delta - 0.5 * math.log(2 * math.pi * curvature), epsilon, curvature * saddle**2


def _first_below(contour: _Contour, epsilon: float, limit: float) -> float:
    """Return the first of the positions 0, 1/4, 1/2, ... whose term is smaller than e^limit."""
    sizes = (contour.log_terms - contour.points * epsilon).real
    return max(float(np.argmax(np.append(sizes, -math.inf) < limit)), 1.0) / 4

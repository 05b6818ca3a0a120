"""Privacy losses of DP-SGD by their moment generating function, where a grid of losses is too coarse.

The moments of one step, of complex order, determine the privacy losses of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from dpaudit._types import FloatArray
from dpaudit.stats.rootfinding import falling_root

# of integrals along paths in the complex plane: measured against integrals with 30 digits
_REACH = 10.0  # of the noise of a step around its mean, beyond which it has a mass below 1e-23
_RISE = 0.3  # the largest slope of the path of the noise
_NEGLIGIBLE, _OMITTED = -30.0, -60.0  # logarithms of shares of a moment
LEAST_NOISE = 0.05
"""The least noise multiplier of a contour; less needs seconds, then gigabytes, as 1 / noise^2."""
_PRECISION, _PRECISION_OF_EPSILON = 1e-15, 1e-10
_LEAST_EPSILON, _LARGEST_EPSILON = 1e-20, 1e9
_CONTOUR_DELTAS = 1e-12, 1e-9, 1e-6, 1e-4, 1e-2, 0.3

ComplexArray: TypeAlias = npt.NDArray[np.complex128]


@dataclass(frozen=True, eq=False)
class StepMoments:
    """Nodes of the integral E[e^(a L)] over the noise of a step, with its log-likelihood ratio L.

    The path of integration is above the real axis, and rises where an example that is included dominates the
    ratio, so that e^(a L) does not oscillate if a is large and imaginary.
    """

    order: float
    ratios: ComplexArray
    log_weights: ComplexArray
    excess: complex  # the integral of e^L - 1, which is 0 up to rounding
    reach: float  # the largest |L| that matters
    rise: float  # slope of the path

    @classmethod
    def of(cls, noise: float, sample_rate: float, num_steps: int, order: float) -> StepMoments:
        # angles of likelihood ratios if an example is removed or added; they vanish at pi
        height = min((1.5, 0.75)[order < 0], 1 / noise)
        spacing = min(0.25, height * noise / 12)
        peak = max(order, 1.0) / noise  # of the noise of a step that includes the example, times e^(a L)
        normal = np.arange(-_REACH, _REACH + peak, spacing)
        inside, outside = math.log(sample_rate), math.log1p(-min(sample_rate, 1 - 1e-16))
        real = np.logaddexp(outside, inside + normal / noise - 0.5 / noise**2)
        log_masses = real * [[max(order, 1.0)], [order]] - normal**2 / 2 + math.log(num_steps)
        real, normal = (
            values[: np.flatnonzero(log_masses[0] > _OMITTED)[-1] + 1] for values in (real, normal)
        )
        reach = float(np.abs(real[log_masses[1, : real.size] > _NEGLIGIBLE]).max())
        # from here on the ratio is mainly that of an example that is included
        turn = 0.5 / noise + noise * (outside - inside)
        past = normal - max(turn, 3.0)
        rise = min(_RISE, 10 * _RISE / max(peak - max(turn, 3.0), 1.0))
        root = np.hypot(past, min(noise, 1.0))
        path = normal + 1j * (height * noise + rise * (root + past) / 2)
        direction = 1 + 0.5j * rise * (1 + past / root)
        log_weights = np.log(direction * spacing / math.sqrt(2 * math.pi)) - path**2 / 2
        exponents = path / noise - 0.5 / noise**2
        early, late = np.split(exponents, [np.searchsorted(normal, turn)])
        late_ratios = late + inside + special.log1p(np.exp(outside - inside - late))
        ratios = np.concatenate([special.log1p(sample_rate * np.expm1(early)), late_ratios])
        excess = sample_rate * (np.exp(exponents + log_weights) - np.exp(log_weights)).sum()
        return cls(order, ratios, log_weights, complex(excess), reach, rise)

    def logs(self, orders: ComplexArray) -> ComplexArray:
        """Return ln E[e^(a L)] for each a, without the part of first order, in which large terms cancel."""
        # terms with smaller weights are computed by their logarithms
        weights, is_inner = np.exp(self.log_weights), self.log_weights.real > -20.0
        moments = np.empty_like(orders)
        num_blocks = 1 + orders.size * self.ratios.size // 200_000
        for block in np.array_split(np.arange(orders.size), num_blocks):
            exponents = orders[block, None] * self.ratios
            moments[block] = np.expm1(exponents[:, is_inner]) @ weights[is_inner]
            outer = np.exp(exponents[:, ~is_inner] + self.log_weights[~is_inner])
            moments[block] += outer.sum(axis=1) - weights[~is_inner].sum()
        return np.asarray(special.log1p(moments - orders * self.excess))

    def derivatives(self) -> tuple[float, float, float]:
        """Return ln E[e^(a L)] and its first two derivatives at a = order."""
        terms = np.exp(self.order * self.ratios + self.log_weights)
        value = float(self.logs(np.asarray([self.order + 0j]))[0].real)
        first = float(((self.ratios * terms).sum() - self.excess).real) / math.exp(value)
        second = float((self.ratios**2 * terms).sum().real) / math.exp(value)
        return value, first, second - first**2

    @property
    def mean_size(self) -> float:
        """The mean of |L|, on the path."""
        return float(np.abs(self.ratios) @ np.exp(self.log_weights.real))


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

"""A whole DP-SGD run: its trade-off curve, its epsilon from the mu of one step, and the noise for an epsilon.

The accountant is called at a few nodes, which takes up to seconds. Between them, curves and ln(epsilon) are
interpolated by cubics with an error estimate, and rounded to the safe side by more than that estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.accounting._log_ratios import log_ratio_attack
from dpaudit.accounting._pld import composed, epsilon_above, epsilon_below, epsilon_near
from dpaudit.errors import InputError
from dpaudit.stats.rootfinding import MonotonePredicate, last_positive, last_true
from dpaudit.stats.tradeoffs import Attack, Gaussian, TradeOff, approximate_fnr, lower_hull, sampled_attack

_STEP = 1 / 12  # distance in ln(parameter) between computed curves, with cubic interpolation in between
_SAFETY = 2e-4  # relative margin on mu: several times the error of that interpolation (tested)
_EDGE = 1e-12  # the smallest error rate that is interpolated
_LEAST = 1e-9
_LEAKIEST = 50.0
# Nodes of the table are 1/24 apart in ln(mu). Cubics use every fourth node, or every second or every node
# where epsilon bends. The error estimate of the cubic is subtracted. Only the cells that are queried are
# computed: an audit queries one to five.
_NODES_PER_UNIT = 24
_NEAR = 3e-4  # the expected error in mu of the fast accountant; a larger error only costs time


@dataclass(frozen=True)
class SubsampledGaussian(TradeOff):
    """``num_steps`` composed Gaussian steps with Poisson subsampling; the parameter is 1/noise_multiplier.

    The curve is the maximum of the lines of the privacy loss distribution's profile. With ``num_lines`` it
    is that of the paper's Algorithm 4 (corrected by its erratum to the maximum of the lines), with deltas
    between ``line_delta`` and 1 - ``line_delta`` spaced logarithmically toward both ends, for small error
    rates.
    """

    symbol: ClassVar[str] = "1/noise_multiplier"
    is_inverse_noise: ClassVar[bool] = True
    sample_rate: float
    num_steps: int
    num_lines: int | None = None
    line_delta: float = 1e-5

    def __post_init__(self) -> None:
        _validate.sample_rate(self.sample_rate)
        _validate.num_steps(self.num_steps)
        _validate.fraction("line_delta", self.line_delta)
        if self.num_lines is not None:
            _validate.integer("num_lines", self.num_lines, low=2)

    def assumption(self, delta: float) -> str | None:
        del delta
        if self.num_steps == 1:
            return f"the mechanism is one Gaussian step with Poisson sampling at rate {self.sample_rate:g}"
        return (
            f"the mechanism is {self.num_steps} Gaussian steps with Poisson sampling at rate "
            f"{self.sample_rate:g}, and each observation comes from a whole run"
        )

    def fnr(self, parameter: float, fpr: FloatArray) -> FloatArray:
        """Interpolate between curves on a lattice of parameters, erring slightly on the leaky side."""
        rate = np.asarray(fpr, dtype=np.float64)
        if parameter <= 0:
            return 1 - rate
        if parameter > _LEAKIEST:  # beyond what any number of observations could distinguish
            return np.where(rate > 0, 0.0, 1.0)
        position = math.log(parameter) / _STEP
        first = math.floor(position) - 1
        levels = self._levels(rate.reshape(-1), first, first + 3)
        best, off = cubic(levels, np.full(levels.shape[1], position - first))
        mu = np.exp(best + off) * (1 + _SAFETY)
        inside = special.ndtr(-special.ndtri(rate) - mu.reshape(rate.shape))
        # for rates so small that the curve consists of its last line only
        outer = self._curve(first + 3).fnr(rate.reshape(-1)).reshape(rate.shape)
        return np.where((rate > _EDGE) & (rate < 1 - _EDGE), inside, outer)

    def parameter(self, fpr: FloatArray, fnr: FloatArray) -> FloatArray:
        rates, misses = np.broadcast_arrays(np.asarray(fpr, float), np.asarray(fnr, float))
        flat = np.clip(rates.reshape(-1), _EDGE, 1 - _EDGE)
        mu = _equivalent_mu(flat, np.clip(misses.reshape(-1), _EDGE, 1 - _EDGE)) / (1 + _SAFETY)
        out = np.zeros(flat.size)
        leaky = mu > _LEAST
        if leaky.any():
            out[leaky] = self._invert(flat[leaky], mu[leaky])
        return out.reshape(rates.shape)

    def _invert(self, fpr: FloatArray, mu: FloatArray) -> FloatArray:
        """Return the parameter at which the interpolated curve passes through each point, by bisection."""
        target = np.log(mu)
        first, levels = self._enclosing(fpr, target, np.log(self._clt_guess(mu)) / _STEP)
        # levels increase, and at the lattice they are those of the interpolated curve
        cell = np.clip((levels[1:-1] < target).sum(axis=0) - 1, 0, len(levels) - 4)
        nearest = np.stack([np.take_along_axis(levels, cell[None] + i, axis=0)[0] for i in range(4)])
        low, high = np.ones(fpr.size), np.full(fpr.size, 2.0)
        for _ in range(45):
            middle = (low + high) / 2
            below = np.add(*cubic(nearest, middle)) < target
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.where(target > levels[1], np.exp((first + cell + low) * _STEP), 0.0)

    def _enclosing(self, fpr: FloatArray, target: FloatArray, guesses: FloatArray) -> tuple[int, FloatArray]:
        """Return the first of a range of curves with their levels, between which all targets are.

        A curve takes two compositions, so the range starts where the guesses are, and grows at an end only
        if a target is beyond it.
        """
        # far below the largest, the exact parameter does not matter and 0 is returned
        lowest = max(math.floor(guesses.min() - 8), math.floor(guesses.max()) - 20)
        highest = min(math.ceil(guesses.max() + 4), math.floor(math.log(_LEAKIEST) / _STEP))
        highest = max(highest, lowest + 5)
        first = min(max(math.floor(guesses.min()) - 1, lowest), highest - 5)
        last = min(max(math.ceil(guesses.max()) + 1, first + 5), highest)
        levels = list(self._levels(fpr, first, last))
        while first > lowest and (target <= levels[1]).any():
            first -= 1
            levels.insert(0, self._levels(fpr, first, first)[0])
        while last < highest and (target >= levels[-2]).any():
            last += 1
            levels.append(self._levels(fpr, last, last)[0])
        return first, np.stack(levels)

    def _clt_guess(self, mu: FloatArray) -> FloatArray:
        """Invert the central limit theorem: mu_total = rate sqrt(steps (exp(mu^2) - 1))."""
        with np.errstate(over="ignore"):
            # the square of 1e150 is a number
            ratio = np.minimum(mu / self.sample_rate, 1e150)
        return np.sqrt(np.log1p(ratio**2 / self.num_steps))

    def _levels(self, fpr: FloatArray, first: int, last: int) -> FloatArray:
        """Return, for each parameter on the lattice, ln mu of the Gaussian curve through its points."""
        rate = np.clip(fpr, _EDGE, 1 - _EDGE)
        rows = [_equivalent_mu(rate, self._curve(i).fnr(rate)) for i in range(first, last + 1)]
        return np.log(np.maximum(np.stack(rows), _LEAST))

    def epsilon(self, parameter: float, delta: float) -> float:
        if delta == 0:
            return math.inf if parameter > 0 else 0.0
        return training_epsilon(parameter, self.sample_rate, self.num_steps, delta)

    def attack(self, parameter: float, delta: float, lengths: tuple[float, ...] = (1.0,)) -> Attack:
        """Return the attack by log-likelihood ratios, which show one direction of the curve."""
        del delta
        mu = parameter * float(np.mean(lengths))
        if self.num_steps == 1:
            return sampled_attack(mu, self.sample_rate)
        attack = log_ratio_attack(1 / min(mu, _LEAKIEST), self.sample_rate, self.num_steps)
        return replace(attack, rates_at=None)  # log-likelihood ratios are not normalized

    def _curve(self, index: int) -> LineEnvelope:
        noise = math.exp(-index * _STEP)
        if self.num_lines is None:
            return _exact_curve(noise, self.sample_rate, self.num_steps)
        return _paper_curve(noise, self.sample_rate, self.num_steps, self.num_lines, self.line_delta)


def _equivalent_mu(fpr: FloatArray, fnr: FloatArray) -> FloatArray:
    """Return mu of the Gaussian curve through each point."""
    return np.minimum(Gaussian().parameter(fpr, fnr), 1e3)


@lru_cache(maxsize=512)
def _exact_curve(noise: float, sample_rate: float, num_steps: int) -> LineEnvelope:
    """Return lines at evenly spaced epsilons from 0 to where delta vanishes: slopes grow geometrically."""
    directions = composed(noise, sample_rate, num_steps)
    largest = max(losses.epsilon(1e-12) for losses in directions)
    if not 0 < largest < math.inf:
        largest = max(*(losses.epsilon(1e-9) for losses in directions), 1e-6)
    # e^700 is about the steepest slope a float can represent; omitting lines only makes the curve leakier
    epsilons = np.linspace(0.0, min(largest, 700.0), 800)
    deltas = np.max([losses.deltas(epsilons) for losses in directions], axis=0)
    return LineEnvelope.of(epsilons, deltas)


@lru_cache(maxsize=512)
def _paper_curve(
    noise: float, sample_rate: float, num_steps: int, num_lines: int, line_delta: float
) -> LineEnvelope:
    """Return the lines of Algorithm 4, one for each of ``num_lines`` deltas."""
    directions = composed(noise, sample_rate, num_steps)
    lowest = math.log(line_delta / (1 - line_delta))
    deltas = special.expit(np.linspace(lowest, -lowest, num_lines))
    epsilons = np.asarray([max(losses.epsilon(delta) for losses in directions) for delta in deltas])
    return LineEnvelope.of(epsilons, deltas)


@dataclass(frozen=True, eq=False)
class LineEnvelope:
    """The curve of ``PiecewiseLinear`` at parameter 1, fast for many error rates.

    Each of the two lines of a guarantee, 1 - delta - e^eps fpr and its mirror image, is the highest between
    its crossings with its neighbors. So the highest line is looked up, and the others are not computed.
    """

    _epsilons: FloatArray
    _deltas: FloatArray
    _steep_ends: FloatArray  # ascending rates beyond which the steep line of the next lower epsilon is higher
    _flat_ends: FloatArray  # the same for the flat line of the next higher epsilon

    @classmethod
    def of(cls, epsilons: FloatArray, deltas: FloatArray) -> LineEnvelope:
        """Return the envelope of guarantees given in any order."""
        eps, dels = lower_hull(epsilons, deltas).T
        with np.errstate(over="ignore"):  # lines of nearly equal epsilons do not cross
            risen = -np.diff(dels) / np.expm1(np.diff(eps))  # e^eps fpr where two neighbors cross
        return cls(eps, dels, (np.exp(-eps[:-1]) * risen)[::-1], 1 - dels[:-1] - risen)

    def fnr(self, fpr: FloatArray) -> FloatArray:
        """Return the highest line at each rate, 0 where all are below."""
        last = self._epsilons.size - 1
        steep = last - np.searchsorted(self._steep_ends, fpr)
        flat = np.searchsorted(self._flat_ends, fpr)
        # rounding may err by one around the line expected to be highest
        near = np.clip(
            np.concatenate([line[None] + np.array([[-1], [0], [1]]) for line in (steep, flat)]), 0, last
        )
        highest: FloatArray = approximate_fnr(self._epsilons[near], self._deltas[near], fpr).max(axis=0)
        return highest


def training_epsilon(mu: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return a lower bound on the epsilon of DP-SGD.

    The first call near a mu takes up to seconds; later calls near it take microseconds. Where epsilon has a
    kink, the accountant is called every time.

    Args:
        mu: One over the noise multiplier.
        sample_rate: The probability that an example is in a batch.
        num_steps: The number of steps.
        delta: The delta of the epsilon.

    Returns:
        The epsilon of the whole run, rounded down.

    Raises:
        InputError: An argument is invalid.

    >>> round(training_epsilon(1.0, 0.05, 300, 1e-5), 1)
    5.8

    """
    if not mu >= 0:
        raise InputError(f"mu must be at least 0, got {mu:g}.")
    rate, steps = _validate.sample_rate(sample_rate), _validate.num_steps(num_steps)
    if mu == 0:
        return 0.0
    if _validate.delta(delta) == 0 or math.isinf(mu):
        return math.inf
    # the epsilon of mu = 100 is a lower bound for all larger ones
    epsilon = _table(rate, steps, delta).epsilon(min(mu, 100.0))
    if math.isnan(epsilon):
        raise InputError(
            f"delta={delta:g} is too small to compute the epsilon of a bound for sample_rate={rate:g} and "
            f"num_steps={steps}; choose a larger delta."
        )
    return epsilon


def noise_for_epsilon(epsilon: float, *, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return the smallest noise multiplier for which DP-SGD has at most this epsilon.

    Args:
        epsilon: The epsilon that you want to claim.
        sample_rate: The probability that an example is in a batch.
        num_steps: The number of steps.
        delta: The delta of the claim.

    Returns:
        The noise multiplier, rounded up.

    Raises:
        InputError: An argument is invalid, or no noise multiplier has such an epsilon.

    >>> noise = noise_for_epsilon(8.0, sample_rate=0.01, num_steps=100, delta=1e-5)
    >>> round(noise, 3)
    0.465

    """
    _validate.positive("epsilon", epsilon)
    rate, steps = _validate.sample_rate(sample_rate), _validate.num_steps(num_steps)
    if _validate.delta(delta) == 0:
        raise InputError("delta must be positive, got 0: Gaussian noise has no finite epsilon at delta 0.")
    is_private = MonotonePredicate(lambda m: epsilon_above(1 / m, rate, steps, delta) <= epsilon)
    # a fast accountant locates the region in which the exact one decides
    near = last_positive(
        lambda m: math.log(epsilon / max(epsilon_near(1 / m, rate, steps, delta), 1e-300)),
        _limit_guess(epsilon, rate, steps),
        _NEAR,
    )
    if near == 0:
        raise InputError(f"No noise multiplier has epsilon={epsilon:g}.")
    for mu in (near * (1 - _NEAR), near * (1 + _NEAR)):
        is_private(mu)
    return 1 / last_true(is_private, 0.5, tolerance=1e-4)


def _limit_guess(epsilon: float, sample_rate: float, num_steps: int) -> float:
    """Return mu of a step by the central limit theorem, with epsilon = mu^2 / 2 + 4 mu for the total mu."""
    total = math.sqrt(16 + 2 * epsilon) - 4
    return math.sqrt(math.log1p((total / sample_rate) ** 2 / num_steps))


class _EpsilonTable:
    """ln(epsilon) on a lattice of ln(mu), computed where queried and finer where it bends."""

    def __init__(self, sample_rate: float, num_steps: int, delta: float) -> None:
        self._setting = sample_rate, num_steps, delta
        self._known: dict[int, float] = {}

    def epsilon(self, mu: float) -> float:
        position = math.log(mu) * _NODES_PER_UNIT
        for stride in (4, 2, 1):
            # the first of the six neighbors whose middle two enclose the position
            first = (math.floor(position / stride) - 2) * stride
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


_table = lru_cache(maxsize=64)(_EpsilonTable)


def cubic(values: FloatArray, at: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the cubic through the four values (or rows) at 0, 1, 2, 3, and an estimate of its error.

    The error is less than the difference to the parabolas through three of the four points, if the function
    is smooth on the scale of the lattice.
    """
    first, second, third = (np.asarray(np.diff(values, order, axis=0)[0]) for order in (1, 2, 3))
    best = values[0] + at * (first + (at - 1) / 2 * (second + (at - 2) / 3 * third))
    # a parabola and the cubic differ by the cubic term, which vanishes at the three points of the parabola
    return best, np.abs(third * (at - 1) * (at - 2)) / 6 * np.maximum(np.abs(at), np.abs(at - 3))

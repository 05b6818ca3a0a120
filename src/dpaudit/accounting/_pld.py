"""Epsilons of DP-SGD, above or below the exact one, and the trade-off curve of any event of dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from dpaudit.accounting._losses import LEAST_NOISE, LossDistribution, TiltedLosses
from dpaudit.errors import InputError
from dpaudit.stats.tradeoffs import PiecewiseLinear

_TOLERABLE = 1e-2  # the largest relative error of delta by rounding


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
            f"Expected a claim whose epsilon can be computed: none was found at delta={delta:g} for "
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
        raise InputError(f"Expected event to be a dp_accounting.DpEvent, got {event!r}.")
    accountant = PLDAccountant()
    if not accountant.supports(event):
        raise InputError(f"Expected an event that dp-accounting's PLD accountant supports, got {event!r}.")
    accountant.compose(event)
    # each line costs a pass over the privacy loss distribution
    points = np.linspace(0.0, _largest_epsilon(accountant), 200)
    at_delta = _finite([accountant.get_epsilon(delta)])
    if not at_delta:
        raise InputError(f"Expected an event with a finite epsilon at delta={delta:g}, got {event!r}.")
    epsilons = np.unique(np.append(points, at_delta))
    deltas = [accountant.get_delta(float(epsilon)) for epsilon in epsilons]
    return PiecewiseLinear(tuple(epsilons), tuple(np.clip(deltas, 0.0, 1.0)))


def _largest_epsilon(accountant: Any) -> float:
    """Return epsilon at the smallest delta with a finite one: 0 for bounded losses, else about 1e-12."""
    deltas = [0.0, *(10.0**-exponent for exponent in range(12, 0, -1))]
    epsilons = _finite(accountant.get_epsilon(delta) for delta in deltas)
    if not epsilons:
        raise InputError("Expected an event with a finite epsilon at some delta up to 0.1, got none.")
    return min(epsilons[0], 700.0)


def _finite(epsilons: Iterable[float]) -> list[float]:
    return [max(float(epsilon), 0.0) for epsilon in epsilons if np.isfinite(epsilon)]

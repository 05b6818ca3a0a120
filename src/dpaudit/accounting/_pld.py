"""Privacy loss distributions from dp-accounting, for subsampled Gaussian steps and for any event."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import fft, special

from dpaudit._types import FloatArray
from dpaudit.errors import InputError
from dpaudit.stats._rootfinding import last_true
from dpaudit.stats.tradeoffs import PiecewiseLinear

_FINE = 1e-3
_ROUNDING_MASS = 4e-14  # rounding error of delta, over the mass that all steps may gain by it
_HUGE = 1e12  # an epsilon above any of interest
_ROUNDING = 1e-5  # the relative error of epsilon from truncating tails at delta = 1e-10
_TRUNCATED, _ORDERS = 1e-15, 20  # mass outside of a composition, and moments that bound it: dp-accounting's
_MOST_LOSSES = 1_000_000
_NUM_LINES = 200  # each line costs a pass over the privacy loss distribution


@lru_cache(maxsize=64)
def composed(noise_multiplier: float, sample_rate: float, num_steps: int, finer: float = 1) -> Any:
    """Return the PLD of the whole training run, rounded pessimistically."""
    # imported here because the import takes longer than the rest of dpaudit
    from dp_accounting.pld import privacy_loss_distribution, privacy_loss_mechanism  # noqa: PLC0415

    interval = _interval(noise_multiplier, sample_rate, num_steps) / finer
    kinds = privacy_loss_mechanism.AdjacencyType
    adjacencies = [kinds.REMOVE] if sample_rate == 1 else [kinds.REMOVE, kinds.ADD]
    try:
        steps = [_step(noise_multiplier, sample_rate, interval, adjacency) for adjacency in adjacencies]
        composed_steps = [_repeated(one, num_steps) for one in steps]
    except (ValueError, ArithmeticError) as error:
        raise InputError(
            "Expected a noise multiplier and sample rate that dp-accounting supports, got "
            f"noise_multiplier={noise_multiplier:g} and sample_rate={sample_rate:g}."
        ) from error
    return privacy_loss_distribution.PrivacyLossDistribution(*composed_steps)


def _step(noise_multiplier: float, sample_rate: float, interval: float, adjacency: Any) -> Any:
    """Return one direction of dp-accounting's ``from_gaussian_mechanism``.

    The same numbers in a fraction of the time: dp-accounting visits thousands of epsilons in a Python loop.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_mechanism  # noqa: PLC0415

    loss = privacy_loss_mechanism.GaussianPrivacyLoss(
        noise_multiplier, sampling_prob=sample_rate, adjacency_type=adjacency
    )
    bounds = loss.connect_dots_bounds()
    first, last = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    if last - first > _MOST_LOSSES:  # of a tiny sample rate, whose losses are tiny too
        raise ValueError("too many losses for the memory")
    is_removed = adjacency == privacy_loss_mechanism.AdjacencyType.REMOVE
    epsilons = np.arange(first, last + 1) * interval
    deltas = _step_deltas(noise_multiplier, sample_rate, epsilons, is_removed=is_removed)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas)


def _repeated(pmf: Any, num_steps: int) -> Any:
    """Return what dp-accounting's ``self_compose`` returns, in half of the time."""
    from dp_accounting.pld import pld_pmf  # noqa: PLC0415

    if num_steps == 1 or not isinstance(pmf, pld_pmf.DensePLDPmf):
        return pmf.self_compose(num_steps)
    probs = pmf._probs
    first, last = _sum_range(probs, num_steps)
    if last - first > _MOST_LOSSES:
        raise ValueError("too many losses for the memory")
    size = fft.next_fast_len(max(last - first + 1, probs.size), real=True)
    wrapped = fft.irfft(fft.rfft(probs, size) ** num_steps, size)
    total = np.roll(wrapped, -first)[: last - first + 1]
    infinity_mass = _TRUNCATED - math.expm1(num_steps * math.log1p(-pmf._infinity_mass))
    lower = pmf._lower_loss * num_steps + first
    return pld_pmf.DensePLDPmf(pmf._discretization, lower, total, infinity_mass, True)


def _sum_range(probs: FloatArray, num_steps: int) -> tuple[int, int]:
    """Return ends outside of which the sum of ``num_steps`` draws has a mass of at most 1e-15, by Chernoff.

    dp-accounting's orders are multiples of 1 / size, so their moments follow from each other.
    """
    lower, upper = 0, (probs.size - 1) * num_steps
    growth = np.exp(np.arange(probs.size) / probs.size)
    for sign in (-1, 1):
        factor, weights = (growth if sign > 0 else 1 / growth), probs
        for order in range(1, _ORDERS + 1):
            weights = weights * factor
            moment = float(weights.sum())
            if not moment > 0:
                continue
            bound = (num_steps * math.log(moment) + math.log(2 / _TRUNCATED)) * probs.size / (sign * order)
            if sign > 0:
                upper = min(upper, math.ceil(bound))
            else:
                lower = max(lower, math.floor(bound))
    return lower, upper


def _step_deltas(noise: float, sample_rate: float, epsilons: FloatArray, *, is_removed: bool) -> FloatArray:
    """Return delta of a subsampled Gaussian step at each epsilon, if an example is removed or added.

    The privacy loss falls with the output x, so delta = P(X <= x) - e^epsilon Q(X <= x) at the x where the
    loss is epsilon. Outputs have mean 0 without the example, and -1 (removed) or 1 (added) in a share q of
    draws with it.
    """
    sign = 1.0 if is_removed else -1.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # the loss of a step that includes the example for certain: ln(1 + (e^loss - 1) / q)
        others = np.minimum((1 - sample_rate) * np.exp(-sign * epsilons), 1.0)
        certain = epsilons - sign * (math.log(sample_rate) - np.log1p(-others))
        x = -sign * 0.5 - certain * noise**2
        if is_removed:
            upper = (1 - sample_rate) * special.ndtr(x / noise) + sample_rate * special.ndtr((x + 1) / noise)
            lower = special.log_ndtr(x / noise)
        else:
            upper = special.ndtr(x / noise)
            lower = np.logaddexp(
                np.log1p(-sample_rate) + special.log_ndtr(x / noise),
                math.log(sample_rate) + special.log_ndtr((x - 1) / noise),
            )
        deltas = upper - np.exp(epsilons + lower)  # in logarithms: e^epsilon may overflow
    # up to ln(1 - q), or from -ln(1 - q) on, one distribution is above the other everywhere
    beyond = -np.expm1(np.minimum(epsilons, 0.0)) if is_removed else 0.0
    return np.clip(np.where(others < 1, deltas, beyond), 0.0, 1.0)


def _interval(noise_multiplier: float, sample_rate: float, num_steps: int) -> float:
    """Return the discretization interval: 1e-3, less for steps with small spread, more for a large epsilon.

    It is at most a twentieth of a step's spread. The error of dp-accounting's "connect the dots" grows with
    interval^2 x steps. Epsilon is estimated by the central limit theorem, or from the largest loss of a step
    if that is smaller.
    """
    mu = 1 / noise_multiplier
    loss = mu**2 / 2 + 10 * mu
    largest = num_steps * (loss + math.log(sample_rate + (1 - sample_rate) * math.exp(-loss)))
    total = sample_rate * math.sqrt(num_steps * math.expm1(min(mu**2, 100.0)))
    epsilon = min(total**2 / 2 + 4 * total, largest)
    usual = min(max(_FINE, epsilon * 6e-5), _spread(noise_multiplier, sample_rate) / 20)
    # rounding errors of delta become masses, of about 2e-16 / interval at each loss of each step
    total_range = max(largest, 0.0) - num_steps * math.log1p(-min(sample_rate, 0.5))
    return max(usual, 2 * math.sqrt(_ROUNDING_MASS * total_range))


def _spread(noise_multiplier: float, sample_rate: float) -> float:
    """Return about the standard deviation of the privacy loss of a step."""
    mu = 1 / noise_multiplier
    return sample_rate * (mu + mu**2 / 2)


@lru_cache(maxsize=4096)
def _epsilon(noise: float, sample_rate: float, num_steps: int, delta: float, finer: float) -> float:
    pld = composed(noise, sample_rate, num_steps, finer)
    with np.errstate(over="ignore"):
        epsilon = float(pld.get_epsilon_for_delta(delta))
    return epsilon if math.isfinite(epsilon) else _search_epsilon(pld, delta)


def _search_epsilon(pld: Any, delta: float) -> float:
    """Search the profile for epsilon: dp-accounting divides by e^-epsilon, which underflows from 709 on."""
    if pld.get_delta_for_epsilon(_HUGE) > delta:
        return math.inf
    below = last_true(lambda epsilon: pld.get_delta_for_epsilon(epsilon) > delta, 700.0)
    return below * (1 + 1e-6)  # an upper bound, like all epsilons here


def epsilon_above(noise: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return an upper bound on epsilon at ``delta``, for claims."""
    return _epsilon(noise, sample_rate, num_steps, delta, 2)


def epsilon_near(noise: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return an approximate epsilon at ``delta``, for initial guesses."""
    return _epsilon(noise, sample_rate, num_steps, delta, 0.25)


def epsilon_below(noise: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """Return a lower bound on epsilon at ``delta``.

    The discretization errs upwards by an amount that falls to a quarter when the interval is halved. The
    truth is below the finer value by a third of the last improvement; here all of it is subtracted.
    """
    if _interval(noise, sample_rate, num_steps) > _spread(noise, sample_rate) / 2:
        return 0.0  # rounding errors do not allow for an interval that is fine enough
    coarse = _epsilon(noise, sample_rate, num_steps, delta, 1)
    fine = _epsilon(noise, sample_rate, num_steps, delta, 2)
    if math.isinf(fine):  # the truncated tail has more mass than delta: no lower bound is known
        return 0.0
    return max(fine * (1 - _ROUNDING) - abs(coarse - fine), 0.0)


def profile(noise: float, sample_rate: float, num_steps: int, epsilons: FloatArray) -> FloatArray:
    """Return an upper bound on delta at each epsilon, in ascending order."""
    pld = composed(noise, sample_rate, num_steps)
    found = [_deltas(pmf.to_dense_pmf(), epsilons) for pmf in {pld._pmf_remove, pld._pmf_add}]
    return np.asarray(np.max(found, axis=0))


def _deltas(pmf: Any, epsilons: FloatArray) -> FloatArray:
    """Return what dp-accounting's ``get_delta_for_epsilon`` returns, which loops over losses in Python."""
    # smaller losses do not count
    first = max(math.floor(epsilons[0] / pmf._discretization) - pmf._lower_loss, 0)
    probs = pmf._probs[first:]
    losses = (np.arange(first, pmf.size) + pmf._lower_loss) * pmf._discretization
    weights = np.stack([probs, probs * np.exp(-losses)])[:, ::-1]
    above = np.concatenate([[[pmf._infinity_mass], [0.0]], weights], axis=1).cumsum(axis=1)
    upper, lower = above[:, losses.size - np.searchsorted(losses, epsilons, side="right")]
    return np.asarray(upper - np.exp(epsilons) * lower)


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
    points = np.linspace(0.0, _largest_epsilon(accountant), _NUM_LINES)
    at_delta = _finite([accountant.get_epsilon(delta)])
    if not at_delta:
        raise InputError(f"Expected an event with a finite epsilon at delta={delta:g}, got {event!r}.")
    epsilons = np.unique(np.append(points, at_delta))
    deltas = [accountant.get_delta(float(epsilon)) for epsilon in epsilons]
    return PiecewiseLinear(tuple(epsilons), tuple(np.clip(deltas, 0.0, 1.0)))


def _largest_epsilon(accountant: Any) -> float:
    """Return epsilon at the smallest delta with a finite one: 0 for bounded losses, else about 1e-12."""
    deltas = [0.0, *(10.0**-exponent for exponent in range(12, 0, -1))]
    found = _finite(accountant.get_epsilon(delta) for delta in deltas)
    if not found:
        raise InputError("Expected an event with a finite epsilon at some delta up to 0.1, got none.")
    return min(found[0], 700.0)


def _finite(epsilons: Iterable[float]) -> list[float]:
    return [max(float(epsilon), 0.0) for epsilon in epsilons if np.isfinite(epsilon)]

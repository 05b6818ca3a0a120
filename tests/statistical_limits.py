"""Limits of statistical tests, computed for the number of runs that a test performs.

A correct implementation violates each limit with probability below 0.1 %; limits of means are normal
approximations, so theirs is about 0.1 %. A limit that no implementation
could violate, or that a broken one would likely keep, raises: such a test belongs in ``make test-long``.
"""

from __future__ import annotations

import math

from scipy import special, stats
from simulated_coverage import Coverage

LEVEL = 0.001  # probability with which a correct implementation may fail a test
POWER = 0.95  # probability with which a broken implementation has to fail it


def most_flagged(
    runs: int, rate: float = 0.05, *, broken: float | None = None, comparisons: int = 1, level: float = LEVEL
) -> int:
    """Return the smallest count that Binomial(runs, rate) exceeds with probability below ``level``.

    A correct implementation may have a lower rate. ``broken`` is the rate under the fault that the test has
    to notice, by default halfway from ``rate`` to 1. ``comparisons`` is the number of counts that are
    compared with the limit.
    """
    limit = int(stats.binom.isf(level / comparisons, runs, rate))
    limit += int(stats.binom.sf(limit, runs, rate) >= level / comparisons)
    fault = (1 + rate) / 2 if broken is None else broken
    noticed = float(stats.binom.sf(limit, runs, fault))
    if noticed < POWER:
        raise ValueError(
            f"{runs} runs are too few: the limit is {limit}, which a fault with a rate of {fault:.3g} "
            f"exceeds with a probability of only {noticed:.2g}. Make more runs, in `make test-long`."
        )
    return limit


def least_caught(
    runs: int, rate: float, *, broken: float | None = None, comparisons: int = 1, level: float = LEVEL
) -> int:
    """Return the largest count that Binomial(runs, rate) falls below with probability below ``level``.

    A correct implementation may have a higher rate. ``broken`` is the rate under the fault that the test has
    to notice, by default half of ``rate``.
    """
    missed = most_flagged(
        runs,
        1 - rate,
        broken=1 - (rate / 2 if broken is None else broken),
        comparisons=comparisons,
        level=level,
    )
    return runs - missed


def covers(found: Coverage, rate: float = 0.05) -> bool:
    """Return whether bounds exceed the truth as rarely as those of a correct method, and not in 25 %."""
    exceeded = round(found.exceeded * found.repetitions)
    return exceeded <= most_flagged(found.repetitions, rate, broken=0.25)


def count_range(runs: int, rate: float, *, comparisons: int = 1) -> tuple[int, int]:
    """Return the lowest and the highest count of an implementation whose rate has to be ``rate``."""
    low = least_caught(runs, rate, broken=0.0, comparisons=comparisons, level=LEVEL / 2)
    return low, most_flagged(runs, rate, broken=1.0, comparisons=comparisons, level=LEVEL / 2)


def room(standard_error: float, *, comparisons: int = 1) -> float:
    """Return how far a mean may be from its expectation, on either side."""
    if not 0 < standard_error < math.inf:
        raise ValueError(f"A standard error of {standard_error} gives no limit.")
    return -float(special.ndtri(LEVEL / 2 / comparisons)) * standard_error


def share_room(rate: float, runs: int, *, comparisons: int = 1) -> float:
    """Return how far the share of many runs may be from ``rate``, on either side."""
    return room(math.sqrt(rate * (1 - rate) / runs), comparisons=comparisons)


def size_variance_room(trials: int, rate: float, runs: int, *, comparisons: int = 1) -> float:
    """Return how far the sample variance of Binomial(trials, rate) may be from its expectation."""
    variance = trials * rate * (1 - rate)
    excess = (1 - 6 * rate * (1 - rate)) / variance  # kurtosis
    return room(variance * math.sqrt((2 + excess) / runs), comparisons=comparisons)


def spread_range(size: int, *, comparisons: int = 1) -> tuple[float, float]:
    """Return the range of the sample standard deviation of normal numbers, in true standard deviations."""
    tail = LEVEL / 2 / comparisons
    low, high = (2 * special.gammaincinv((size - 1) / 2, share) / (size - 1) for share in (tail, 1 - tail))
    return math.sqrt(low), math.sqrt(high)

"""Check that the posterior takes milliseconds.

One threshold may take at most 10 ms; the best of all thresholds of 10,000 scores per side, at most 1 s. The
same interval of privacy-estimates is shown at one point, with the posterior mass below both, which should be
half the error rate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _measure import Table, finish, medians, milliseconds
from _others import Job, ask, parser
from scipy import stats

import dpaudit

DELTA, ERROR = 1e-5, 0.05
TRADEOFFS = (dpaudit.Gaussian(), dpaudit.ApproximateDP())
MUS = (0.0, 0.1, 0.39, 1.0, 3.0, 6.0)
SIZES = (1_000, 2_500, 10_000, 1_000_000)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=15)
    options = arguments.parse_args()
    tables = [_one_threshold(options.repetitions), _all_thresholds()]
    if options.others is not None:
        tables.append(_next_to_privacy_estimates(options.others))
    return finish(*tables)


def _one_threshold(repetitions: int) -> Table:
    table = Table(
        "Posterior at one threshold", ("scores per side", "trade-off", "slowest mu", "time", "limit")
    )
    for size in SIZES:
        for tradeoff in TRADEOFFS:
            times = {mu: _median_of_counts(size, mu, tradeoff, repetitions) for mu in MUS}
            slowest = max(times, key=times.__getitem__)
            cells = f"{size:,}", type(tradeoff).__name__, f"{slowest:g}", milliseconds(times[slowest])
            table.add(*cells, "10 ms", met=times[slowest] <= 0.010)
    return table


def _median_of_counts(size: int, mu: float, tradeoff: Any, repetitions: int) -> float:
    rng = np.random.default_rng(0)
    functions = {"bound": lambda counts: _bound(counts, tradeoff)}
    return medians(functions, repetitions, lambda: (_counts(rng, size, mu),))["bound"]


def _counts(rng: np.random.Generator, size: int, mu: float) -> dpaudit.ErrorCounts:
    """Return error counts of the exact Gaussian mechanism at its midpoint."""
    false_positives, false_negatives = rng.binomial(size, stats.norm.cdf(-mu / 2), size=2).tolist()
    return dpaudit.ErrorCounts(
        false_positives=false_positives,
        num_absent=size,
        false_negatives=false_negatives,
        num_present=size,
    )


def _bound(observed: Any, tradeoff: Any, rule: Any = None) -> dpaudit.Bound:
    return dpaudit.lower_bound(
        observed,
        delta=DELTA,
        confidence=1 - ERROR,
        tradeoff=tradeoff,
        inference=dpaudit.Posterior(),
        threshold=rule,
    )


def _all_thresholds(size: int = 10_000) -> Table:
    table = Table(
        f"Posterior over all thresholds, {size:,} scores per side", ("mu", "trade-off", "time", "limit")
    )
    for mu in (0.0, 0.39, 1.0, 3.0):
        for tradeoff in TRADEOFFS:
            time = medians({"scan": _scan(tradeoff)}, 3, _scores(size, mu))["scan"]
            table.add(f"{mu:g}", type(tradeoff).__name__, milliseconds(time), "1,000 ms", met=time <= 1)
    return table


def _scores(size: int, mu: float) -> Callable[[], tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    return lambda: (rng.normal(mu, 1, size), rng.normal(0, 1, size))


def _scan(tradeoff: Any) -> Callable[..., dpaudit.Bound]:
    def scan(present: Any, absent: Any) -> dpaudit.Bound:
        observations = dpaudit.Observations(with_canary=present, without_canary=absent)
        return _bound(observations, tradeoff, dpaudit.SameData())

    return scan


def _next_to_privacy_estimates(python: Path, size: int = 1_000, mu: float = 1.0) -> Table:
    present, absent = _scores(size, mu)()
    observations = dpaudit.Observations(with_canary=present, without_canary=absent)
    rule = dpaudit.Fixed(mu / 2)
    ours = _bound(observations, dpaudit.ApproximateDP(), rule)
    time = medians({"": lambda: _bound(observations, dpaudit.ApproximateDP(), rule)}, 5)[""]
    settings = {"delta": DELTA, "error": ERROR, "threshold": mu / 2}
    other = ask(python, [Job("privacy_estimates joint-beta", present, absent, settings)])[0]
    table = Table(
        f"The (eps, delta) interval at one point, {size:,} scores per side, mu = {mu:g}",
        ("tool", "epsilon", "posterior mass below", "time", "ratio"),
    )
    rows = [("dpaudit", ours.epsilon, time)]
    rows += [("privacy-estimates", bound, other.seconds) for bound in other.bounds]
    for name, epsilon, taken in rows:
        mass = f"{100 * _mass_below(epsilon, ours.counts):.2f} % (expected {50 * ERROR:g} %)"
        table.add(name, f"{epsilon:.4f}", mass, milliseconds(taken), f"{taken / time:,.0f}")
    if other.error is not None:
        table.add("privacy-estimates", "-", other.error, milliseconds(other.seconds), "-")
    return table


def _mass_below(epsilon: float, counts: Any, draws: int = 4_000_000) -> float:
    """Return the posterior mass that satisfies (epsilon, delta)-DP, by Monte Carlo."""
    rng = np.random.default_rng(0)
    fpr, fnr = (
        rng.beta(errors + 0.5, trials - errors + 0.5, draws)
        for errors, trials in (
            (counts.false_positives, counts.num_absent),
            (counts.false_negatives, counts.num_present),
        )
    )
    factor = np.exp(epsilon)
    inside = np.ones(draws, dtype=bool)
    for one, other in ((fpr, fnr), (fnr, fpr), (1 - fpr, 1 - fnr), (1 - fnr, 1 - fpr)):
        inside &= 1 - one <= factor * other + DELTA
    return float(inside.mean())


if __name__ == "__main__":
    sys.exit(main())

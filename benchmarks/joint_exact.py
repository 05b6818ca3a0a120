"""Check that the exact joint bound takes at most 20 ms with 2,500 scores per side.

A million scores per side are also measured, without a limit. Every call has new counts.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from _measure import Table, finish, medians, milliseconds
from scipy import stats

import dpaudit

LIMIT = 0.020
MUS = (0.0, 0.1, 0.39, 1.0, 3.0, 6.0)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repetitions", type=int, default=15)
    options = arguments.parse_args()
    table = Table("JointExact", ("scores per side", "trade-off", "mu", "time", "limit"))
    for size, limit in ((2_500, LIMIT), (1_000_000, None)):
        for tradeoff in (dpaudit.Gaussian(), dpaudit.ApproximateDP()):
            for mu in MUS:
                time = _median(size, mu, tradeoff, options.repetitions)
                table.add(
                    f"{size:,}",
                    type(tradeoff).__name__,
                    f"{mu:g}",
                    milliseconds(time),
                    "-" if limit is None else f"{1e3 * limit:g} ms",
                    met=None if limit is None else time <= limit,
                )
    return finish(table)


def _median(size: int, mu: float, tradeoff: dpaudit.TradeOff, repetitions: int) -> float:
    rng = np.random.default_rng(0)
    rate = stats.norm.cdf(-mu / 2)

    def counts() -> tuple[dpaudit.ErrorCounts]:
        false_positives, false_negatives = rng.binomial(size, rate, size=2).tolist()
        return (
            dpaudit.ErrorCounts(
                false_positives=false_positives,
                num_absent=size,
                false_negatives=false_negatives,
                num_present=size,
            ),
        )

    def bound(observed: dpaudit.ErrorCounts) -> dpaudit.Bound:
        return dpaudit.lower_bound(observed, delta=1e-5, tradeoff=tradeoff, inference=dpaudit.JointExact())

    bound(*counts())  # the first call builds a table of log-factorials
    return medians({"bound": bound}, repetitions, counts)["bound"]


if __name__ == "__main__":
    sys.exit(main())

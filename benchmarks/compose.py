"""Check that composing a per-step bound over a training run takes at most 5 ms after the first calls.

The first calls, at three values of mu, build a table. Later calls use other values, from 0.2 to 2 times the
first. Bounds with the curve of the whole run (SubsampledGaussian) are also measured, without a limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import numpy as np
from _measure import Table, finish, milliseconds, seconds

import dpaudit

LIMIT = 0.005
DELTA = 1e-5
# sample rate, number of steps, noise multiplier; the first is the paper's CIFAR-10 training at epsilon 8
TRAINING_RUNS = ((4096 / 50000, 2500, 2.577), (0.01, 1000, 1.0), (0.3, 10, 1.0), (1.0, 100, 10.0))


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    return finish(_steps(), _whole_runs())


def _steps() -> Table:
    table = Table(
        "Composing mu of a step to epsilon",
        ("sample rate", "steps", "first calls", "later, median", "later, slowest", "limit"),
    )
    for rate, steps, noise in TRAINING_RUNS:
        first = sum(
            seconds(dpaudit.training_epsilon, scale / noise, rate, steps, DELTA) for scale in (1.0, 1.4, 0.7)
        )
        others = np.geomspace(0.2, 2.0, 250) / noise
        times = [seconds(dpaudit.training_epsilon, mu, rate, steps, DELTA) for mu in others.tolist()]
        slowest = _slowest(times)
        table.add(
            f"{rate:g}",
            f"{steps:,}",
            milliseconds(first),
            milliseconds(statistics.median(times)),
            milliseconds(slowest),
            f"{1e3 * LIMIT:g} ms",
            met=slowest <= LIMIT,
        )
    return table


def _slowest(times: list[float]) -> float:
    """Return the largest median of five consecutive times, because a single time may be an outlier."""
    return max(statistics.median(times[i : i + 5]) for i in range(0, len(times), 5))


def _whole_runs(size: int = 1_000) -> Table:
    table = Table(
        f"Bounds with the curve of the whole training run, {size:,} runs per side",
        ("sample rate", "steps", "inference", "first call", "later, median", "later, slowest"),
    )
    for rate, steps, _ in TRAINING_RUNS[:2]:
        for inference in (dpaudit.ClopperPearson(), dpaudit.JointExact(), dpaudit.Posterior()):
            curve = dpaudit.SubsampledGaussian(rate, steps)
            times = [seconds(_bound, errors, size, curve, inference) for errors in range(100, 200, 4)]
            table.add(
                f"{rate:g}",
                f"{steps:,}",
                type(inference).__name__,
                milliseconds(times[0]),
                milliseconds(statistics.median(times[1:])),
                milliseconds(max(times[1:])),
            )
    return table


def _bound(
    errors: int, size: int, curve: dpaudit.SubsampledGaussian, inference: dpaudit.Inference
) -> dpaudit.Bound:
    counts = dpaudit.ErrorCounts(
        false_positives=errors, num_absent=size, false_negatives=150, num_present=size
    )
    return dpaudit.lower_bound(counts, delta=DELTA, tradeoff=curve, inference=inference)


if __name__ == "__main__":
    sys.exit(main())

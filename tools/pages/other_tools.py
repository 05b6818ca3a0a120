"""Print the table of docs/comparison.md: methods of jax_privacy and of dpaudit on the same scores.

    PYTHONPATH=src .venv-bench/bin/python tools/pages/other_tools.py [repetitions]

The scores are those of an ideal attack on the Gaussian mechanism, 1,000 per side. The table shows the median
epsilon, and how often epsilon exceeds the truth.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from jax_privacy import auditing

import dpaudit

Method = Callable[[Any, Any], float]

DELTA, ERROR, SIZE = 1e-5, 0.05, 1000
FEW = 40  # repetitions of slow methods


def theirs(name: str, **options: Any) -> Method:
    return lambda present, absent: getattr(auditing.CanaryScoreAuditor(present, absent), name)(
        ERROR, DELTA, **options
    )


def ours(tradeoff: dpaudit.TradeOff, inference: dpaudit.Inference, rule: dpaudit.ThresholdRule) -> Method:
    return lambda present, absent: (
        dpaudit.lower_bound(
            dpaudit.Observations(with_canary=present, without_canary=absent),
            delta=DELTA,
            tradeoff=tradeoff,
            inference=inference,
            threshold=rule,
        ).epsilon
    )


METHODS: dict[str, Method] = {
    "jax_privacy clopper_pearson": theirs("epsilon_clopper_pearson"),
    "jax_privacy clopper_pearson, Split": theirs(
        "epsilon_clopper_pearson", one_sided=False, threshold_strategy=auditing.Split(seed=0)
    ),
    "dpaudit (eps, delta), Simultaneous": ours(
        dpaudit.ApproximateDP(), dpaudit.ClopperPearson(), dpaudit.Simultaneous()
    ),
    "dpaudit (eps, delta), HeldOut": ours(
        dpaudit.ApproximateDP(), dpaudit.JointExact(), dpaudit.HeldOut(0.2)
    ),
    "jax_privacy one_run": theirs("epsilon_one_run"),
    "jax_privacy one_run_fdp": theirs("epsilon_one_run_fdp"),
    "jax_privacy from_gdp": theirs("epsilon_from_gdp"),
    "dpaudit Gaussian, HeldOut": ours(dpaudit.Gaussian(), dpaudit.JointExact(), dpaudit.HeldOut(0.1)),
    "dpaudit Gaussian, Fixed": ours(dpaudit.Gaussian(), dpaudit.JointExact(), dpaudit.Fixed(0.5)),
}


def scores(mu: float, repetitions: int) -> list[tuple[Any, Any]]:
    """Return scores in units of the signal; without signal, the noise has standard deviation 1."""
    rng = np.random.default_rng(0)
    mean, noise = (1.0, 1 / mu) if mu else (0.0, 1.0)
    return [(rng.normal(mean, noise, SIZE), rng.normal(0.0, noise, SIZE)) for _ in range(repetitions)]


def main(repetitions: int) -> None:
    for mu in (0.0, 1.0):
        truth, data = dpaudit.Gaussian().epsilon(mu, DELTA), scores(mu, repetitions)
        for name, method in METHODS.items():
            found = [float(method(*pair)) for pair in (data[:FEW] if name.endswith("fdp") else data)]
            above = sum(epsilon > truth + 1e-9 for epsilon in found)
            median = statistics.median(found)
            print(f"epsilon {truth:5.2f}  {name:36} {median:5.2f}  above {above} of {len(found)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)

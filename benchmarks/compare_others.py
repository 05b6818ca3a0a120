"""Run methods of jax_privacy 2.0.0 and privacy-estimates 0.1.0.post1, without importing dpaudit.

The two arguments are JSON files: jobs to read and answers to write. A job names a method below, a .npz file
with the scores ``present`` and ``absent`` (one row per repetition), and settings.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import privacy_estimates
from jax_privacy import auditing

Method = Callable[..., float]


def clopper_pearson(present: Any, absent: Any, *, delta: float, error: float) -> float:
    """Return the default bound of jax_privacy: all thresholds, each with a share of the error rate."""
    return auditing.CanaryScoreAuditor(present, absent).epsilon_clopper_pearson(error, delta)


def clopper_pearson_at(present: Any, absent: Any, *, delta: float, error: float, threshold: float) -> float:
    """Return the bound at a threshold fixed before the data."""
    return auditing.CanaryScoreAuditor(present, absent).epsilon_clopper_pearson(
        error, delta, one_sided=False, threshold_strategy=auditing.Explicit(threshold)
    )


def clopper_pearson_split(present: Any, absent: Any, *, delta: float, error: float) -> float:
    """Return the bound with a threshold chosen on one half of the scores and applied to the other."""
    return auditing.CanaryScoreAuditor(present, absent).epsilon_clopper_pearson(
        error, delta, one_sided=False, threshold_strategy=auditing.Split(seed=0)
    )


def from_gdp(present: Any, absent: Any, *, delta: float, error: float) -> float:
    """Return the bound derived from mu of Gaussian DP."""
    return auditing.CanaryScoreAuditor(present, absent).epsilon_from_gdp(error, delta)


def one_run(present: Any, absent: Any, *, delta: float, error: float) -> float:
    """Return the bound of Steinke et al. 2023."""
    return auditing.CanaryScoreAuditor(present, absent).epsilon_one_run(error, delta)


def one_run_fdp(present: Any, absent: Any, *, delta: float, error: float) -> float:
    """Return the bound of Mahloujifar et al. 2024 with the Gaussian curve."""
    return auditing.CanaryScoreAuditor(present, absent).epsilon_one_run_fdp(error, delta)


def _estimate(method: str, share: float) -> Method:
    """Return a method of privacy-estimates that uses ``share`` of the error rate."""

    def estimate(present: Any, absent: Any, *, delta: float, error: float, threshold: float) -> float:
        false_positives = int((absent > threshold).sum())
        false_negatives = int((present <= threshold).sum())
        counts = privacy_estimates.AttackResults(
            FN=false_negatives,
            FP=false_positives,
            TN=absent.size - false_positives,
            TP=present.size - false_negatives,
        )
        alpha = share * error
        return privacy_estimates.compute_eps_lo(counts, delta=delta, alpha=alpha, method=method)

    return estimate


METHODS: dict[str, Method] = {
    "jax_privacy clopper_pearson": clopper_pearson,
    "jax_privacy clopper_pearson at": clopper_pearson_at,
    "jax_privacy clopper_pearson split": clopper_pearson_split,
    "jax_privacy from_gdp": from_gdp,
    "jax_privacy one_run": one_run,
    "jax_privacy one_run_fdp": one_run_fdp,
    "privacy_estimates beta": _estimate("beta", 1.0),
    "privacy_estimates jeffreys": _estimate("jeffreys", 1.0),
    # the lower end of the two-sided interval that the paper reports, as dpaudit.Posterior does
    "privacy_estimates joint-beta": _estimate("joint-beta", 0.5),
}


def run(method: str, scores: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the bound of every repetition and the median time per repetition."""
    bounds, times, error = [], [], None
    with np.load(scores) as tables:
        rows = list(zip(tables["present"], tables["absent"], strict=True))
    for present, absent in rows:
        start = time.perf_counter()
        try:
            bounds.append(float(METHODS[method](present, absent, **settings)))
        except Exception as problem:  # noqa: BLE001  # any error of another tool is a result
            error = repr(problem)
        times.append(time.perf_counter() - start)
    return {"bounds": bounds, "seconds": statistics.median(times), "error": error}


def main(jobs: Path, answers: Path) -> None:
    found = [run(**job) for job in json.loads(jobs.read_text())]
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

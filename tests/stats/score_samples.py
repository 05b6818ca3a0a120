"""Scores, counts and bounds that many tests of statistics need."""

from __future__ import annotations

from typing import Any

import numpy as np

import dpaudit


def gaussian_claim(mu: float = 1.0) -> dpaudit.Claim:
    return dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=1e-5)


def gaussian_scores(mu: float, size: int | tuple[int, int], seed: int = 0, **kind: Any) -> Any:
    """Scores of both sides with unit noise, mu apart."""
    rng = np.random.default_rng(seed)
    return dpaudit.Observations(
        with_canary=rng.normal(mu, 1, size), without_canary=rng.normal(0, 1, size), **kind
    )


def counts(fp: int, num_absent: int, fn: int, num_present: int) -> dpaudit.ErrorCounts:
    return dpaudit.ErrorCounts(
        false_positives=fp, num_absent=num_absent, false_negatives=fn, num_present=num_present
    )


def bound(
    observations: Any, inference: Any = None, rule: Any = None, tradeoff: Any = None, **more: Any
) -> dpaudit.Bound:
    """The bound on mu of a method, by default of Clopper-Pearson limits."""
    return dpaudit.lower_bound(
        observations,
        delta=more.pop("delta", 1e-5),
        tradeoff=tradeoff or dpaudit.Gaussian(),
        inference=inference or dpaudit.ClopperPearson(),
        threshold=rule,
        **more,
    )

"""Audits of the planned size find the leak as often as planned."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from statistical_limits import count_range

import dpaudit
from dpaudit import Betting, Claim, ClopperPearson, ErrorCounts, Gaussian, JointExact, Leak

AUDITS = 400


def _scores(mu: float, size: tuple[int, ...], rng: np.random.Generator) -> dpaudit.Observations:
    """Normalised scores of the Gaussian mechanism itself."""
    present, absent = 1 + rng.standard_normal(size) / mu, rng.standard_normal(size) / mu
    return dpaudit.Observations(with_canary=present, without_canary=absent, normalized=True)


@pytest.mark.parametrize("inference", [ClopperPearson(), JointExact()], ids=repr)
@pytest.mark.parametrize(("noise_multiplier", "noise_factor"), [(1.0, 0.7), (0.3, 0.85)])
def test_counts_have_the_planned_power(
    inference: dpaudit.Inference, noise_multiplier: float, noise_factor: float
) -> None:
    claim = Claim.gaussian(noise_multiplier=noise_multiplier, delta=1e-5)
    plan = dpaudit.plan_observations(claim, Leak(noise_factor=noise_factor), inference=inference)
    assert plan.num_steps is not None
    assert plan.num_observations is not None

    @cache
    def is_found(false_positives: int, false_negatives: int) -> bool:
        counts = ErrorCounts(
            false_positives=false_positives,
            num_absent=plan.num_observations,
            false_negatives=false_negatives,
            num_present=plan.num_observations,
        )
        # the tails have a tenth of the error
        level = 0.95 if plan.num_observations < 100 else 0.955
        bound = dpaudit.lower_bound(
            counts, delta=1e-5, tradeoff=Gaussian(), inference=inference, confidence=level
        )
        return bound.parameter > 1 / noise_multiplier

    rng = np.random.default_rng(11)
    found = 0
    for _ in range(AUDITS):
        scores = _scores(1 / (noise_multiplier * noise_factor), (plan.num_steps,), rng)
        found += is_found(int((scores.without_canary > 0.5).sum()), int((scores.with_canary <= 0.5).sum()))
    planned = _planned_power(plan, claim)
    assert planned >= plan.leak.probability
    fewest, most = count_range(AUDITS, planned)
    assert fewest <= found <= most


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_canaries", "noise_factor"), [(1, 0.7), (8, 0.8), (64, 0.8)])
def test_betting_has_the_planned_power(num_canaries: int, noise_factor: float) -> None:
    claim = Claim.gaussian(noise_multiplier=2.577, delta=1e-5)
    plan = dpaudit.plan_steps(claim, Leak(noise_factor=noise_factor), num_canaries=num_canaries)
    assert plan.num_steps is not None
    rng, runs = np.random.default_rng(12), AUDITS // 4
    found = 0
    for _ in range(runs):
        scores = _scores(1 / (2.577 * noise_factor), (plan.num_steps,), rng)
        if num_canaries > 1:
            present = rng.random((plan.num_steps, 2 * num_canaries)) < 0.5
            values = present + 2.577 * noise_factor * rng.standard_normal(present.shape)
            scores = dpaudit.Observations.from_presence(values, present, normalized=True)
        result = dpaudit.audit(scores, claim=claim, inference=Betting())
        found += result.verdict is dpaudit.Verdict.VIOLATION
    fewest, most = count_range(runs, 0.75)[0], count_range(runs, 0.85)[1]
    assert fewest <= found <= most
    assert _planned_power(plan, claim) == pytest.approx(0.8, abs=0.03)


def _planned_power(plan: dpaudit.Plan, claim: Claim) -> float:
    """The power of the design: that of a count grows in jumps."""
    from dpaudit.stats._planning import _Planner  # noqa: PLC0415

    assert plan.num_steps is not None
    assert plan.num_canaries is not None
    aim = _Planner.of(claim, plan.inference, 0.95, None)
    design = aim.design(plan.num_steps, plan.num_canaries)
    return design.power(aim.hypothesis.parameter, plan.leak.parameter)

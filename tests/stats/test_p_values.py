"""The p-value of a result: the smallest error rate at which the claim is refuted, by bound or tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statistical_limits import most_flagged

import dpaudit
from dpaudit.diagnostics import Check, Diagnosis, Finding

DELTA = 1e-5
CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=DELTA)
COUNTS: dict[str, dict[str, Any]] = {
    "joint, fixed": {"inference": dpaudit.JointExact(), "threshold": dpaudit.Fixed(0.5)},
    "limits, fixed": {"inference": dpaudit.ClopperPearson(), "threshold": dpaudit.Fixed(0.5)},
    "joint, bands": {"inference": dpaudit.JointExact(), "threshold": dpaudit.Simultaneous(8)},
    "limits, bands": {"inference": dpaudit.ClopperPearson(), "threshold": dpaudit.Simultaneous(8)},
    "joint, tails": {"inference": dpaudit.JointExact(), "threshold": dpaudit.Tails()},
    "joint, optimal": {"inference": dpaudit.JointExact(), "threshold": dpaudit.Optimal(0.5)},
    "default": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "joint, held out": {"inference": dpaudit.JointExact(), "threshold": dpaudit.HeldOut(0.2)},
    "bets, fixed": {"inference": dpaudit.Betting(), "threshold": dpaudit.Fixed(0.5)},
    "bets, held out": {"inference": dpaudit.Betting(), "threshold": dpaudit.HeldOut(0.2)},
    "bets, predictable": {"inference": dpaudit.Betting(), "threshold": dpaudit.Predictable()},
}


def independent(mu: float, size: int, rng: np.random.Generator) -> dpaudit.Observations:
    noise = rng.standard_normal((2, size)) / mu
    return dpaudit.Observations(with_canary=1 + noise[1], without_canary=noise[0], normalized=True)


def stepped(mu: float, num_steps: int, width: int, rng: np.random.Generator) -> dpaudit.Observations:
    present = rng.random((num_steps, width)) < 0.5
    scores = present + rng.standard_normal(present.shape) / mu
    return dpaudit.Observations.from_presence(scores, present, normalized=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*COUNTS, *OTHERS])
@settings(max_examples=8, deadline=None)
@given(
    mu=st.sampled_from([1.0, 1.3, 1.6, 2.5]),
    size=st.sampled_from([40, 150]),
    confidence=st.sampled_from([0.9, 0.95, 0.999]),
    seed=st.integers(0, 1000),
)
def test_a_violation_is_a_p_value_of_at_most_the_error_rate(
    name: str, mu: float, size: int, confidence: float, seed: int
) -> None:
    scores, method = independent(mu, size, np.random.default_rng(seed)), (COUNTS | OTHERS)[name]
    result = dpaudit.audit(scores, claim=CLAIM, confidence=confidence, **method)
    assert bool(result.refuted) == (result.p_value <= 1 - result.confidence)
    assert 0 < result.p_value <= 1
    assert result.to_dict()["p_value"] == result.p_value


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [name for name in COUNTS if name not in ("joint, tails", "joint, optimal")])
def test_counts_refute_the_claim_from_their_p_value_on(name: str) -> None:
    scores, method = independent(1.45, 300, np.random.default_rng(3)), COUNTS[name]
    p_value = dpaudit.audit(scores, claim=CLAIM, **method).p_value
    assert 1e-12 < p_value < 0.45
    for factor, is_refuted in ((1.02, True), (0.97, False)):
        result = dpaudit.audit(scores, claim=CLAIM, confidence=1 - factor * p_value, **method)
        assert bool(result.refuted) == is_refuted


def test_the_p_value_of_bets_is_one_over_their_largest_wealth() -> None:
    scores = stepped(1.2, 60, 32, np.random.default_rng(1))
    bets = dpaudit.Betting(expected=1.0, tails=0.0)
    result = dpaudit.audit(scores, claim=CLAIM, inference=bets)
    query = dpaudit.stats.BoundQuery(dpaudit.Gaussian(), DELTA, 0.05)
    placed = bets.start(32, query, by_coin=True, with_tails=False)
    errors = np.zeros(60)
    np.add.at(errors, scores.steps.with_canary, scores.with_canary <= 0.5)
    np.add.at(errors, scores.steps.without_canary, scores.without_canary > 0.5)
    placed.extend(1 - 2 * errors / 32)
    allowed = 1 - 2 * dpaudit.Gaussian().balanced_error(1.0)
    wealth = np.exp(placed._main._wealth.logs(allowed).max())
    assert result.p_value == pytest.approx(1 / wealth, rel=1e-9)


@pytest.mark.parametrize("design", ["steps", "counts"])
def test_p_values_of_correct_runs_are_at_least_uniform(design: str, is_long: bool) -> None:
    rng, runs = np.random.default_rng(11), 1500 if is_long else 150

    def result() -> dpaudit.Result:
        if design == "steps":
            return dpaudit.audit(stepped(1.0, 60, 16, rng), claim=CLAIM)
        return dpaudit.audit(independent(1.0, 60, rng), claim=CLAIM, **COUNTS["limits, fixed"])

    found = np.asarray([result().p_value for _ in range(runs)])
    for level in (0.05, 0.1, 0.2, 0.4):
        assert np.count_nonzero(found <= level) <= most_flagged(runs, level, broken=level + 0.25)


@pytest.mark.parametrize(
    ("p_value", "joint"), [(0.0004, 0.004), (0.002, 0.02), (1e-8, 1e-7), (0.0, 2.3e-308)]
)
def test_bound_and_tests_have_their_shares_of_the_error_rate(p_value: float, joint: float) -> None:
    """Two tests, of which the smaller p-value counts twice, with a fifth of the error rate."""
    scores = stepped(0.5, 60, 16, np.random.default_rng(0))
    bound = dpaudit.audit(scores, claim=CLAIM, confidence=0.96)
    checks = [
        Check(name=name, p_value=value, sentence="", estimate=1.0)
        for name, value in (("noise-variance", p_value), ("noise-shape", 0.5))
    ]
    result = replace(bound, diagnosis=Diagnosis.of(checks, confidence=0.99))
    assert result.confidence == pytest.approx(0.95)
    assert result.p_value == pytest.approx(joint, rel=0.05, abs=0)
    assert "no correct run has" not in result.details()
    assert (result.verdict is dpaudit.Verdict.VIOLATION) == (joint <= 0.05)
    certain = Finding.certain("sum-norm", "It is longer.")
    fact = replace(bound, diagnosis=Diagnosis.of(checks, confidence=0.99, certain=[certain]))
    assert fact.p_value == 0
    assert "p-value: 0: a finding that no correct run has" in fact.details()


def test_only_a_violation_prints_its_p_value() -> None:
    rng = np.random.default_rng(0)
    assert "p-value" not in dpaudit.audit(stepped(1.0, 60, 64, rng), claim=CLAIM).details()
    text = dpaudit.audit(stepped(3.0, 300, 64, rng), claim=CLAIM).details()
    assert "p-value: below 1e-12, the smallest error rate at which the claim is refuted" in text

"""What ``print(result)`` shows: short, ASCII, and rounded to the safe side."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from short_blocks import require_short

import dpaudit
from dpaudit import Claim, Observations
from dpaudit.stats import Block, Result

DPSGD = Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.05, num_steps=300, delta=1e-5)
GAUSSIAN = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
APPROXIMATE = Claim.approximate_dp(epsilon=1.0, delta=1e-5)


def audited(claim: Claim, size: int, noise: float, **options: Any) -> Result:
    rng = np.random.default_rng(0)
    scores = noise * rng.standard_normal((2, size))
    observations = Observations(with_canary=1 + scores[0], without_canary=scores[1], **options)
    return dpaudit.audit(observations, claim=claim)


RESULTS = {
    "violation": audited(DPSGD, 2000, 0.7, normalized=True, scores_of="step"),
    "no violation": audited(DPSGD, 2000, 1.0, normalized=True, scores_of="step"),
    "underpowered": audited(DPSGD, 4, 1.0, normalized=True, scores_of="step"),
    "one run": audited(DPSGD, 300, 0.5, scores_of="one-run"),
    "runs": audited(DPSGD, 300, 0.1, scores_of="run"),
    "black box": audited(GAUSSIAN, 500, 1.0),
    "approximate": audited(APPROXIMATE, 500, 0.2),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_printed_result_is_short(name: str) -> None:
    result = RESULTS[name]
    require_short(str(result))
    assert "\n" not in repr(result)
    assert str(Block.of(result.to_dict())) == str(result)


SENTENCES = st.text(min_size=1, max_size=400)


@given(
    findings=st.lists(SENTENCES, max_size=6),
    causes=st.lists(SENTENCES, max_size=3),
    to_check=st.lists(SENTENCES, max_size=3),
    notes=st.lists(SENTENCES, max_size=4),
    p_value=st.sampled_from([0.0, 1e-13, 1e-5, 0.03]),
    epsilon=st.one_of(st.floats(0, 1e300), st.just(math.nan), st.just("inf")),
    name=st.sampled_from(sorted(RESULTS)),
)
def test_any_sentences_fit(
    *,
    findings: list[str],
    causes: list[str],
    to_check: list[str],
    notes: list[str],
    p_value: float,
    epsilon: Any,
    name: str,
) -> None:
    document = copy.deepcopy(RESULTS[name].to_dict())
    listed, facts = (
        [{"name": "noise-variance", "sentence": sentence} for sentence in sentences]
        for sentences in (findings, to_check)
    )
    document["diagnosis"] = {"findings": [], "to_check": facts, "confidence": 0.99, "tests": [1] * 30}
    if findings and document["verdict"] != "UNDERPOWERED":
        document |= {"verdict": "VIOLATION", "refuted": [*document["refuted"], "mechanism"]}
        document["diagnosis"] |= {"findings": listed, "notes": notes}
        document["likely_causes"] = causes
    document |= {"notes": notes, "p_value": p_value}
    document["claim"]["epsilon"] = epsilon
    require_short(str(Block.of(document)))


@given(claimed=st.floats(0.001, 100), excess=st.floats(1e-9, 1e-2))
def test_a_refuted_epsilon_is_printed_below_its_bound(claimed: float, excess: float) -> None:
    document = copy.deepcopy(RESULTS["violation"].to_dict())
    document["claim"]["epsilon"], document["bound"]["epsilon"] = claimed, claimed + excess
    words = Block.of(document).numbers.replace(",", "").split()
    assert float(words[4]) < float(words[2]) <= claimed + excess


def test_the_headline_says_what_is_refuted() -> None:
    assert str(RESULTS["violation"]).startswith("VIOLATION (privacy): epsilon >= ")
    assert str(RESULTS["no violation"]).startswith("NO VIOLATION FOUND: epsilon >= ")
    assert str(RESULTS["underpowered"]).startswith("UNDERPOWERED: 4 scores per side cannot test")
    assert "Not a proof of privacy" in str(RESULTS["no violation"])


def test_a_result_is_not_a_truth_value() -> None:
    with pytest.raises(TypeError, match="is_violation"):
        bool(RESULTS["violation"])


def test_an_error_of_a_violation_is_the_printed_result() -> None:
    assert RESULTS["violation"].is_violation
    with pytest.raises(dpaudit.ViolationError) as error:
        RESULTS["violation"].raise_for_violation()
    assert str(error.value) == str(RESULTS["violation"])
    RESULTS["underpowered"].raise_for_violation()
    with pytest.raises(dpaudit.ViolationError, match="UNDERPOWERED"):
        RESULTS["underpowered"].raise_for_violation(underpowered="raise")


@pytest.mark.parametrize("name", RESULTS)
def test_details_have_all_that_the_result_knows(name: str) -> None:
    result, details = RESULTS[name], RESULTS[name].details()
    for text in (result.claim.summary, result.bound.statement, result.bound.label, str(result.power)):
        assert text in details
    for text in (*result.bound.assumptions, *result.not_covered, *result.notes):
        assert text in details

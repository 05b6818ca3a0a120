"""What a diagnosis says, and what may be behind it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import SIZE, correct_noise, diagnostics, names
from statistical_limits import spread_range

import dpaudit
from dpaudit.diagnostics import Check, CheckResults, Diagnosis, Finding, likely_causes


def check(name, p_value):
    return Check(name=name, p_value=p_value, sentence=f"{name} is off.", estimate=0.5)


def test_findings_are_those_that_remain_after_the_correction_the_most_certain_first():
    checks = [check("a", 0.02), check("b", 0.001), check("c", 0.9), check("d", 0.012)]
    diagnosis = Diagnosis.of(checks, confidence=0.95)
    assert [finding.name for finding in diagnosis.findings] == ["b", "d", "a"]
    assert [finding.adjusted for finding in diagnosis.findings] == pytest.approx([0.004, 0.036, 0.04])
    assert Diagnosis.of(checks, confidence=0.99).findings[0].name == "b"
    assert len(Diagnosis.of(checks, confidence=0.99).findings) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0.5, 0.999))
def test_there_is_a_finding_only_if_one_p_value_is_small_for_their_number(p_values, confidence):
    diagnosis = Diagnosis.of([check(str(i), p) for i, p in enumerate(p_values)], confidence=confidence)
    assert bool(diagnosis.findings) == (min(p_values) * len(p_values) <= 1 - confidence)


def test_every_test_has_a_likely_cause_of_its_own():
    names = [check.name for check in diagnostics(num_steps=30).diagnose().checks]
    assert [name for name in names if not likely_causes(findings=[name])] == [
        "noise-variance"
    ]  # by its ratio


def test_a_diagnosis_without_findings_raises_nothing_and_never_says_private():
    diagnosis = diagnostics(num_steps=30).diagnose()
    diagnosis.raise_for_findings()
    assert str(diagnosis) == "No findings in 26 tests, at 95 % joint confidence."
    assert diagnosis.likely_causes() == ()
    assert len(diagnosis.table().splitlines()) == 26
    assert "FOUND" not in diagnosis.table()


def test_a_finding_is_raised_with_its_sentence_and_its_cause():
    diagnosis = diagnostics(lambda rng, step: 0.5**0.5 * correct_noise(rng, step), num_steps=30).diagnose()
    with pytest.raises(dpaudit.FindingError, match="noise-variance") as caught:
        diagnosis.raise_for_findings()
    assert isinstance(caught.value, AssertionError)
    assert "1/sqrt(2): is it added by each of 2 workers" in str(caught.value)
    assert "FOUND" in diagnosis.table()


def test_a_diagnosis_is_plain_values_for_json():
    diagnosis = diagnostics(lambda rng, step: 0.5 * correct_noise(rng, step), num_steps=30).diagnose()
    read = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert read["findings"][0]["name"] == "noise-variance"
    low, high = spread_range(30 * SIZE)
    assert low < read["findings"][0]["estimate"] / 0.5 < high
    assert read["noise"]["ratio"] == read["findings"][0]["estimate"]
    assert [test["name"] for test in read["tests"]] == [test.name for test in diagnosis.checks]
    assert read["likely_causes"] == list(diagnosis.likely_causes())


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan, "0.95"])
def test_a_confidence_that_is_none_is_refused(confidence):
    with pytest.raises(dpaudit.InputError, match="confidence"):
        diagnostics(num_steps=1).diagnose(confidence)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"noise_ratio": 0.0}, "no noise"),
        ({"noise_ratio": 1e-9}, "no noise"),
        ({"noise_ratio": 0.707}, "1/sqrt(2): is it added by each of 2 workers, then averaged?"),
        ({"noise_ratio": 2.0}, "sqrt(4): is it added by each of 4 workers or micro-steps, then summed?"),
        ({"noise_ratio": 0.0157, "batch_size": 64}, "1/batch size: is noise for the mean added to the sum?"),
        ({"noise_ratio": 1e-4, "batch_size": 10_000}, "1/batch size"),
        ({"noise_ratio": 64.0, "batch_size": 64}, "batch size: is noise for the sum added to the mean?"),
        ({"noise_ratio": 10.0, "max_grad_norm": 0.1}, "not scaled by the clipping norm?"),
        ({"noise_ratio": 0.1, "max_grad_norm": 0.1}, "scaled by the clipping norm twice?"),
        ({"noise_ratio": 0.4, "noise_multiplier": 2.5}, "is it scaled by the clipping norm alone?"),
        ({"noise_ratio": 0.445}, "1/sqrt(5): is it added by each of 5 workers"),
        (
            {"noise_ratio": 0.5, "max_grad_norm": 2.0},
            "1/max_grad_norm: is it not scaled by the clipping norm?",
        ),
        ({"noise_ratio": 0.5, "noise_multiplier": 0.5}, "std: is the variance used as a standard deviation?"),
        (
            {"noise_ratio": 0.7071, "noise_multiplier": 1.0, "max_grad_norm": 2.0},
            "is the square root of the standard deviation used?",
        ),
        ({"noise_ratio": 0.7, "interval": (0.6, 0.8)}, "does the noise multiplier in use differ"),
        ({"noise_ratio": 0.81}, "does the noise multiplier in use differ"),
        ({"signal": 10.0, "canary_scale": 10.0}, "the canary reaches the release unclipped"),
        (
            {"signal": 0.16, "canary_scale": 10.0, "batch_size": 64},
            "is the mean or the sum of the batch clipped",
        ),
        ({"signal": 5.66, "is_crowded": True}, "is the mean or the sum of the batch clipped instead of each"),
        (
            {"signal": 32.0, "canary_scale": 10.0, "batch_size": 32},
            "is the sum released instead of the mean?",
        ),
        ({"signal": 1 / 64}, "which is 1/64: if a mean is released, pass batch_size="),
        ({"signal": 0.0}, "the canary does not reach the release"),
        ({"signal": 3.0, "canary_scale": 10.0}, "3 times the clipping norm"),
        ({"findings": ["leaf-correlation"]}, "the same PRNG key or seed"),
        ({"findings": ["repeated-noise"]}, "reseeded"),
        ({"noise_ratio": 0.98, "findings": ["repeated-noise"]}, "reseeded"),
        ({"noise_ratio": 0.7071, "findings": ["step-noise"]}, "a step released without noise"),
        ({"noise_ratio": 0.0, "findings": ["noise-shape"]}, "no noise"),
    ],
)
def test_numbers_point_to_their_cause(known, expected):
    assert expected in likely_causes(**known)[0]


def test_numbers_of_the_training_come_before_a_number_of_workers_of_which_only_the_nearest_is_guessed():
    causes = likely_causes(0.5, interval=(0.49, 0.51), max_grad_norm=2.0, batch_size=4)
    assert ["max_grad_norm" in cause for cause in causes] == [True, False, False]
    assert "1/sqrt(batch size)" in causes[1]
    assert "1/sqrt(4): is it added by each of 4 workers" in causes[2]
    assert len(likely_causes(0.31, interval=(0.3, 0.32))) == 1  # of 10 or 11 workers


def test_where_noise_is_missing_its_amount_in_all_is_no_cause_of_its_own():
    for name in ("step-noise", "leaf-noise", "coordinate-noise", "repeated-noise"):
        assert len(likely_causes(0.7071, findings=[name])) == 1
    assert len(likely_causes(0.7071, findings=["noise-shape"])) == 2


def test_a_canary_that_arrives_as_it_should_names_no_cause_also_if_its_length_is_the_batch_size():
    assert likely_causes(signal=1.0, canary_scale=10.0, batch_size=10) == ()


def test_a_signal_between_the_norm_and_the_canary_names_both_causes():
    norm, mean = likely_causes(signal=5.66, canary_scale=10.0)
    assert "another norm" in norm
    assert "is the mean or the sum of the batch clipped" in mean


@pytest.mark.parametrize(
    "names",
    [
        ["repeated-noise", "coordinate-noise", "noise-shape", "noise-variance"],
        ["coordinate-correlation", "repeated-noise", "step-noise"],
        ["leaf-noise", "coordinate-noise", "noise-variance"],
        ["coordinate-noise", "step-noise"],
        ["step-correlation", "repeated-noise"],
    ],
    ids=["same noise", "broadcast", "no noise in a leaf", "noise in few coordinates", "moving average"],
)
def test_of_findings_without_any_doubt_the_cause_comes_before_its_consequences(names):
    estimates = {"coordinate-correlation": 300.0, "step-noise": 0.08, "coordinate-noise": 1e-9}
    estimates["repeated-noise"] = 0.7 if "step-correlation" in names else 1.0
    estimates["leaf-noise"] = 1e-8
    made = [
        Check(name=name, p_value=p_value, sentence="", estimate=estimates.get(name, 0.5))
        for p_value, name in zip((1e-40, 1e-30, 0.0, 1e-20), reversed(names), strict=False)
    ]
    assert [finding.name for finding in Diagnosis.of(made, confidence=0.95).findings] == names


def test_what_is_right_has_no_cause():
    assert likely_causes(1.0) == likely_causes(1.01) == likely_causes(signal=1.0, canary_scale=10.0) == ()
    assert likely_causes(0.9, interval=(0.7, 1.1)) == ()
    assert likely_causes(findings=["something-else"]) == ()


def test_joined_checks_shares_one_error_rate_and_certain_findings_come_first():
    first = Diagnosis.of(
        [Check(name="noise-shape", p_value=0.03, sentence="A.", estimate=1.0)], confidence=0.95
    )
    more = CheckResults(
        checks=(Check(name="batch-sizes", p_value=0.5, sentence="B.", estimate=1.0),),
        certain=(Finding.certain("sum-norm", "The sum is too long."),),
        not_covered=("the loader",),
    )
    both = first.joined(more)
    assert [finding.name for finding in first.findings] == ["noise-shape"]
    assert [finding.name for finding in both.findings] == ["sum-norm"]  # 0.03 is not small among two tests
    assert both.not_covered == ("the loader",)
    assert str(both.findings[0]) == "sum-norm: The sum is too long."
    assert [finding.name for finding in both.joined().findings] == ["sum-norm"]


def test_a_mean_of_the_noise_comes_before_the_correlations_that_follow_from_it():
    found = diagnostics(lambda rng, _: rng.random(SIZE), num_steps=60).diagnose()
    assert {"step-correlation", "repeated-noise", "coordinate-correlation"} <= set(names(found))
    first, *others = found.likely_causes()
    assert first.startswith("the mean of the noise is 0.5")
    assert not any("reseeded" in one or "reused" in one for one in others)
    shared = diagnostics(lambda rng, _: np.full(SIZE, rng.standard_normal()), num_steps=60).diagnose()
    assert shared.likely_causes()[0].startswith("is noise of a smaller shape broadcast")

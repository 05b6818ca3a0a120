"""What a diagnosis says, and what may be behind it."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import correct_noise, diagnostics

import dpaudit
from dpaudit.diagnostics import Check, Diagnosis, likely_causes


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


def test_a_diagnosis_without_findings_raises_nothing_and_never_says_private():
    diagnosis = diagnostics(num_steps=30).diagnose()
    diagnosis.raise_for_findings()
    assert str(diagnosis) == "Nothing found by 16 tests, 95 % confidence for all together."
    assert diagnosis.likely_causes() == ()
    assert len(diagnosis.table().splitlines()) == 16
    assert "FOUND" not in diagnosis.table()


def test_a_finding_is_raised_with_its_sentence_and_its_cause():
    diagnosis = diagnostics(lambda rng, step: 0.5**0.5 * correct_noise(rng, step), num_steps=30).diagnose()
    with pytest.raises(dpaudit.FindingError, match="noise-variance") as caught:
        diagnosis.raise_for_findings()
    assert isinstance(caught.value, AssertionError)
    assert "1/sqrt(2): added by each of 2 workers" in str(caught.value)
    assert "FOUND" in diagnosis.table()


def test_a_diagnosis_is_plain_values_for_json():
    diagnosis = diagnostics(lambda rng, step: 0.5 * correct_noise(rng, step), num_steps=30).diagnose()
    read = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert read["findings"][0]["name"] == "noise-variance"
    assert read["findings"][0]["estimate"] == pytest.approx(0.5, rel=0.05)
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
        ({"noise_ratio": 0.707}, "1/sqrt(2): added by each of 2 workers, then averaged?"),
        ({"noise_ratio": 2.0}, "sqrt(4): added by each of 4 workers or micro-steps, then summed?"),
        ({"noise_ratio": 0.0157, "batch_size": 64}, "1/batch size: noise for the mean added to the sum?"),
        ({"noise_ratio": 1e-4, "batch_size": 10_000}, "1/batch size"),
        ({"noise_ratio": 64.0, "batch_size": 64}, "batch size: noise for the sum added to the mean?"),
        ({"noise_ratio": 10.0, "max_grad_norm": 0.1}, "not scaled by the clipping norm?"),
        ({"noise_ratio": 0.1, "max_grad_norm": 0.1}, "scaled by the clipping norm twice?"),
        ({"noise_ratio": 0.4, "noise_multiplier": 2.5}, "noise of the clipping norm alone?"),
        ({"noise_ratio": 0.81}, "is the noise multiplier that is used the one"),
        ({"signal": 10.0, "canary_scale": 10.0}, "the canary arrives unclipped"),
        ({"signal": 0.16, "canary_scale": 10.0, "batch_size": 64}, "the mean of the batch is clipped"),
        ({"signal": 3.0, "canary_scale": 10.0}, "3 times the clipping norm"),
        ({"findings": ["leaf-correlation"]}, "the same PRNG key or seed"),
        ({"findings": ["repeated-noise"]}, "seeded anew"),
    ],
)
def test_numbers_point_to_their_cause(known, expected):
    assert expected in likely_causes(**known)[0]


def test_the_nearest_cause_comes_first_and_an_interval_widens_the_search():
    causes = likely_causes(0.5, interval=(0.45, 0.55), batch_size=4)
    assert "1/sqrt(4)" in causes[0] or "1/2" in causes[0]
    assert len(causes) > len(likely_causes(0.53))


def test_what_is_right_has_no_cause():
    assert likely_causes(1.0) == likely_causes(1.01) == likely_causes(signal=1.0, canary_scale=10.0) == ()
    assert likely_causes(0.9, interval=(0.7, 1.1)) == ()
    assert likely_causes(findings=["something-else"]) == ()


def test_every_test_has_a_cause_to_name():
    made = diagnostics(num_steps=30).diagnose().checks
    for name in {test.name for test in made} - {"noise-variance"}:
        assert likely_causes(findings=[name])

"""What an observer recorded is judged like a step: scores, noise, and the numbers that explain both."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from plugin_calls import fixture
from scipy import stats

import dpaudit
from dpaudit.diagnostics import NoiseCheck, ObservedStep
from dpaudit.diagnostics._diagnosis import joint_causes
from dpaudit.recording import DPSGDParams, PerStep, ReadClaim, Recorder, TrainingInfo, WholeRun
from dpaudit.recording._joint_verdict import ScoreSummary

READ = DPSGDParams(noise_multiplier=1.0, sample_rate=0.05, delta=1e-5)
COUNT = 64
FACTS = TrainingInfo(canary=dpaudit.Dirac(), max_grad_norm=4.0, batch_size=32)


def properties(audit):
    return dict(audit._node.user_properties)


def recorded(noise=lambda rng, _: rng.standard_normal(COUNT), signal=1.0, num_steps=200):
    """What an observer would have recorded of a training with such noise."""
    parts = {"checks": [NoiseCheck()], "scorer": PerStep(signal=1.0), "facts": lambda: FACTS}
    recorder = Recorder(claim=ReadClaim(lambda: READ), num_steps=None, **parts)
    rng = np.random.default_rng(0)
    for index in range(num_steps):
        drawn, present = noise(rng, index), rng.random(COUNT) < 0.5
        recorder.observe(ObservedStep.of_release(drawn, np.zeros(COUNT), leaves=(COUNT // 2, COUNT // 2)))
        recorder.record(drawn + signal * present, present)
    return recorder


def failure(recorder, **options):
    with pytest.raises(pytest.fail.Exception) as failed:
        fixture()(recorder, **options)
    return str(failed.value)


def test_a_correct_training_passes_and_its_noise_was_tested():
    audit = fixture()
    audited = audit(recorded())
    assert audited.diagnosis.findings == ()
    assert properties(audit)["dp_audit.1.findings"] == "none"
    # the first call of the only test has a half of 5 %: the bound four fifths of it, the tests the rest
    assert audited.result.bound.confidence == pytest.approx(0.98)
    assert audited.diagnosis.confidence == pytest.approx(0.995)


def test_the_claim_of_the_real_training_is_passed_whole_or_as_numbers():
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.05, num_steps=2000, delta=1e-5)
    numbers = {part.name: part.value for part in claim.parts}
    results = [fixture()(recorded(), **options).result for options in ({"claim": claim}, numbers)]
    assert results[0].claim.epsilon == results[1].claim.epsilon == claim.epsilon
    assert results[0].bound == results[1].bound
    with pytest.raises(dpaudit.InputError, match=r"claim=\.\.\. or delta="):
        fixture()(recorded(), claim=claim, delta=1e-5)


def test_an_epsilon_that_the_parameters_do_not_have_fails_the_test():
    numbers = {"num_steps": 200, "epsilon": 3.0}
    assert "  finding  claimed-epsilon: Epsilon 3 was claimed" in failure(recorded(), **numbers)
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.05, num_steps=200, delta=1e-5)
    assert "claimed-epsilon" in failure(recorded(), claim=claim, epsilon=3.0)
    audit = fixture()
    audit(recorded(), claim=claim, epsilon=5.0)
    assert properties(audit)["dp_audit.1.numbers"].endswith(f" of 5 ({claim.epsilon:.2f})")


def test_causes_know_the_numbers_of_the_training():
    assert "about 1/max_grad_norm: is it not scaled" in failure(
        recorded(lambda rng, _: rng.standard_normal(COUNT) / 4)
    )
    assert "cause    The canary reaches the release unclipped" in failure(recorded(signal=10.0))


def test_a_summary_of_scores_states_their_noise_with_its_interval_and_the_signal_of_the_canary():
    recorder = recorded(lambda rng, _: 0.5 * rng.standard_normal(COUNT), signal=2.0, num_steps=20)
    state = recorder.state_dict()
    found = ScoreSummary.of(state["scores"], state["present"], recorder.facts)
    absent, present = (state["scores"][state["present"] == inserted] for inserted in (False, True))
    energy, count = float((absent**2).sum()), absent.size
    low, high = (math.sqrt(energy / stats.chi2.ppf(level, count)) for level in (0.9995, 0.0005))
    assert found.noise == pytest.approx(math.sqrt(energy / count))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.signal == pytest.approx(present.mean() - absent.mean())
    assert not found.is_crowded
    assert found.known(1.0) == {
        "signal": found.signal,
        "is_crowded": False,
        "canary_scale": FACTS.canary_scale,
        "batch_size": 32,
        "max_grad_norm": 4.0,
        "noise_multiplier": 1.0,
        "noise_ratio": found.noise,
        "interval": (found.low, found.high),
    }
    assert "noise_ratio" not in found.known(0.5)  # within the interval


def test_the_amount_of_noise_explains_nothing_once_it_is_known_where_noise_is_missing():
    def causes(*names):
        findings = [dpaudit.Finding.certain(name, "It is so.") for name in names]
        diagnosis = dpaudit.Diagnosis.of([], confidence=0.95, certain=findings)
        return " ".join(joint_causes(diagnosis, {"noise_ratio": 0.5, "signal": 3.0}))

    amount, signal = "50 % of the claimed level", "3 times the clipping norm"
    assert amount in causes("noise-shape")
    located = causes("noise-shape", "leaf-noise")
    assert amount not in located
    assert signal in located
    assert "is a parameter skipped" in causes("noise-variance", "leaf-noise")


def test_a_training_whose_canaries_do_not_arrive_gets_no_verdict_but_a_guess():
    text = failure(recorded(signal=0.01, num_steps=2000))
    assert text.startswith("NO VERDICT")
    assert "if a mean is released, pass batch_size=" in " ".join(text.split())


def test_recorders_of_scores_alone_say_that_the_noise_was_not_tested():
    plain = dpaudit.Recorder(claim=dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5), num_steps=100)
    rng, tests = np.random.default_rng(0), dpaudit.Diagnostics()
    for _ in range(100):
        noise, present = rng.standard_normal(COUNT), rng.random(COUNT) < 0.5
        plain.record(noise + present, present)
        tests.observe_noise(0.5 * noise)
    audit = fixture()
    assert audit(plain).diagnosis is None
    assert properties(audit)["dp_audit.1.findings"] == "not run"
    assert "noise-variance" in failure(plain, tests=tests)


def test_a_run_that_a_look_may_have_ended_has_a_verdict_and_says_that_its_noise_was_not_tested():
    watched, audit = recorded(), fixture()
    watched.live()
    assert audit(watched).diagnosis is None
    assert properties(audit)["dp_audit.1.findings"] == "not run"
    assert properties(audit)["dp_audit.1.verdict"] == "NO_VIOLATION"


def test_tests_alone_can_fail_a_test():
    rng, good, bad = np.random.default_rng(0), dpaudit.Diagnostics(), dpaudit.Diagnostics()
    for _ in range(100):
        noise = rng.standard_normal(COUNT)
        good.observe_noise(noise)
        bad.observe_noise(0.5 * noise)
    audit = fixture()
    assert audit(good).findings == ()
    assert properties(audit)["dp_audit.1.findings"] == "none"
    assert "finding  noise-variance" in failure(bad)


@pytest.mark.long
def test_recorders_of_sampled_canaries_are_taken():
    rng = np.random.default_rng(0)
    present = rng.random(500) < 0.5
    scorer, claim = WholeRun(present, signal=1.0), ReadClaim(lambda: READ)
    recorder = Recorder(claim=claim, num_steps=None, scorer=scorer, checks=[NoiseCheck()])
    for _ in range(30):
        noise, joined = rng.standard_normal(500), present & (rng.random(500) < 0.05)
        recorder.observe(ObservedStep.of_release(noise[:COUNT], np.zeros(COUNT), leaves=(COUNT,)))
        recorder.record(noise + joined, joined)
    audited = fixture()(recorder)
    assert audited.result.verdict is not dpaudit.Verdict.VIOLATION
    assert audited.diagnosis.findings == ()


def test_what_an_observer_returns_beside_its_recorder_is_told_apart():
    with pytest.raises(dpaudit.InputError, match=r"of type SimpleNamespace: pass its \.recorder"):
        fixture()(SimpleNamespace(recorder=recorded(num_steps=1)))

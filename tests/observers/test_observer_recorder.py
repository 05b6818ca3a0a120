"""What an observer's recorder says before it judges."""

import numpy as np
import pytest

import dpaudit
from dpaudit.observers._recorder import ObserverRecorder
from dpaudit.observers._terms import Terms

NOTHING = Terms()
READ = Terms(noise_multiplier=1.0, sample_rate=0.05, delta=1e-5)


def recorded(num_steps, given=NOTHING, read=READ):
    recorder, rng = ObserverRecorder(lambda: read, given), np.random.default_rng(0)
    for _ in range(num_steps):
        present = rng.random(16) < 0.5
        recorder.record(present + rng.standard_normal(16), present)
    return recorder


def test_a_training_that_did_not_run_is_told_as_such():
    with pytest.raises(
        dpaudit.InputError, match="at least one recorded step, got none: did the training run"
    ):
        recorded(0).audit()


def test_more_steps_than_claimed_are_refused():
    with pytest.raises(dpaudit.InputError, match="at most num_steps=10 steps, which the claim is of, got 20"):
        recorded(20, Terms(num_steps=10)).audit()
    with pytest.raises(dpaudit.InputError, match="at most num_steps=15"):
        recorded(20).audit(num_steps=15)
    assert recorded(20, Terms(num_steps=20)).audit().verdict is not dpaudit.Verdict.VIOLATION


def test_a_training_without_noise_has_no_claim_of_its_own():
    silent = recorded(20, read=Terms(noise_multiplier=0.0, sample_rate=0.05, delta=1e-5))
    with pytest.raises(dpaudit.InputError, match="above 0, got 0: without noise there is no claim"):
        silent.audit()
    assert silent.audit(noise_multiplier=1.0).claim.epsilon > 0


def test_a_sample_rate_that_contradicts_the_training_is_told():
    for result in (recorded(20).audit(sample_rate=0.5), recorded(20, Terms(sample_rate=0.5)).audit()):
        assert "sample rate 0.5" in result.claim.summary
        assert "sample_rate=0.5 was given for the claim, and this training says 0.05" in str(result)


def test_a_sample_rate_that_is_rounded_otherwise_is_not_told():
    assert recorded(20).audit(sample_rate=0.0501).not_covered == ()
    assert recorded(20, read=Terms(noise_multiplier=1.0, delta=1e-5)).audit(sample_rate=0.5).not_covered == ()


def test_canaries_that_do_not_arrive_are_no_proof_of_anything():
    recorder, rng = ObserverRecorder(lambda: READ, Terms()), np.random.default_rng(0)
    for _ in range(50):
        recorder.record(0.1 * rng.standard_normal(16), rng.random(16) < 0.5)
    with pytest.raises(dpaudit.InputError, match="or they were clipped together with others"):
        recorder.audit()


@pytest.mark.parametrize(
    "look",
    [lambda seen: seen.live(), lambda seen: seen.curve([10]), lambda seen: seen.course()],
    ids=["live", "curve", "course"],
)
def test_whoever_sees_the_bound_before_the_end_may_have_ended_the_run(look):
    recorder = recorded(20)
    assert recorder.audit().bound.method == "Betting(horizon=None)"
    look(recorder)
    assert recorder.audit().bound.method == "Betting(horizon=1000)"
    assert recorder.state_dict()["looked"]

"""The recorder of canaries that a sampler draws, alone: so many correct runs that its error rate shows."""

from dataclasses import replace

import numpy as np
import pytest
from statistical_limits import least_caught, most_flagged

import dpaudit
from dpaudit.recording import DPSGDParams, ReadClaim, Recorder, WholeRun

VIOLATION = dpaudit.Verdict.VIOLATION
READ = DPSGDParams(noise_multiplier=0.5, sample_rate=0.04, delta=1e-5)
STEPS, CANARIES = 100, 512


def observing(present, reach=1.0, finished=None):
    scorer = WholeRun(present, signal=1.0, reach=reach, finished=finished)
    return Recorder(claim=ReadClaim(lambda: READ), num_steps=None, scorer=scorer)


def recorded(seed, *, rate=0.04, reach=1.0, finished=None):
    """A run of a training that draws, clips and noises as it should, if the rate is the claimed one."""
    rng = np.random.default_rng(seed)
    present = rng.random(CANARIES) < 0.5
    recorder = observing(present, reach, finished)
    for _ in range(STEPS):
        joined = present & (rng.random(CANARIES) < rate)
        recorder.record(joined + rng.normal(0.0, 0.5 / reach, CANARIES), joined)
    return recorder


@pytest.mark.long
@pytest.mark.parametrize(("reach", "runs"), [pytest.param(1.0, 60, marks=pytest.mark.long), (0.87, 20)])
def test_correct_runs_are_flagged_in_5_percent_at_most(reach, runs):
    flagged = sum(recorded(seed, reach=reach).audit().verdict is VIOLATION for seed in range(runs))
    assert flagged <= most_flagged(runs)


def test_drawing_twice_as_often_is_flagged():
    found = [recorded(seed, rate=0.08).audit().verdict is VIOLATION for seed in range(5)]
    assert sum(found) >= least_caught(5, 0.99, broken=0.05)


def test_a_run_that_cannot_be_judged_gets_neither_verdict_nor_bound():
    def refuse(rate):
        raise dpaudit.InputError(f"not at {rate}")

    recorder = recorded(0, finished=refuse)
    for judge in (recorder.audit, recorder.one_run_bound):
        with pytest.raises(dpaudit.InputError, match=r"not at 0\.04"):
            judge()


def test_scores_that_do_not_rise_get_neither_verdict_nor_bound():
    present, rng = np.arange(CANARIES) % 2 == 0, np.random.default_rng(0)
    recorder = observing(present)
    for _ in range(STEPS):
        recorder.record(rng.normal(0.0, 0.5, CANARIES), present & (rng.random(CANARIES) < 0.04))
    for judge in (recorder.audit, recorder.one_run_bound):
        with pytest.raises(dpaudit.InputError, match="Scores must increase by 1"):
            judge()


def test_an_epsilon_is_no_number_of_a_bound():
    recorder = observing(np.arange(CANARIES) % 2 == 0)
    with pytest.raises(TypeError, match="epsilon"):
        recorder.one_run_bound(epsilon=2.0)


def test_a_run_goes_on_from_its_state_with_the_draws_that_were_seen():
    whole, rng = recorded(0), np.random.default_rng(0)
    again = observing(whole.scorer.present)
    again.load_state_dict(whole.state_dict())
    assert replace(again.audit(), times=None).to_dict() == replace(whole.audit(), times=None).to_dict()
    again.record(rng.normal(0.0, 0.5, CANARIES), np.zeros(CANARIES, bool))
    assert again.num_done == STEPS + 1
    before, after = (recorder.state_dict() for recorder in (whole, again))
    assert after["drawn"] == before["drawn"]
    assert after["absent"][0] == before["absent"][0] + CANARIES

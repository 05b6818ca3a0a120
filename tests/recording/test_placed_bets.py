"""The bets that a recorder placed are those of its verdict, whatever becomes known later."""

import numpy as np
import pytest

import dpaudit
from dpaudit.recording import DPSGDParams, PerStep, ReadClaim, Recorder

DELTA = 1e-2  # large, so that a curve at delta 0 differs
GAUSSIAN = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=DELTA)
SAMPLED = DPSGDParams(sample_rate=0.05, delta=DELTA)
NOISY = DPSGDParams(noise_multiplier=1.0, sample_rate=0.05, delta=DELTA)
CHOSEN = "this method was chosen before any bound of the run was shown"


def recorded(
    claim=GAUSSIAN, num_steps=60, num_done=60, num_canaries=32, *, noise=0.8, tradeoff=None, **options
):
    recorder = Recorder(claim=claim, num_steps=num_steps, scorer=PerStep(tradeoff=tradeoff), **options)
    add(recorder, num_done, num_canaries, noise)
    return recorder


def add(recorder, num_steps, num_canaries=32, noise=0.8):
    rng = np.random.default_rng(recorder.num_done)
    for _ in range(num_steps):
        present = rng.random(num_canaries) < 0.5
        recorder.record(present + noise * rng.standard_normal(num_canaries), present)


def read(params):
    return ReadClaim(lambda: params)


@pytest.mark.parametrize(
    ("claim", "tradeoff"),
    [
        (GAUSSIAN, None),
        (GAUSSIAN, dpaudit.ApproximateDP()),
        (GAUSSIAN, dpaudit.Laplace()),
        (dpaudit.Claim.approximate_dp(epsilon=1.0, delta=DELTA), None),
        (dpaudit.Claim.approximate_dp(epsilon=1.0, delta=DELTA), dpaudit.PureDP()),
        (dpaudit.Claim.curve(dpaudit.Laplace(), parameter=1.0, delta=0.0), None),
        (dpaudit.Claim.curve(dpaudit.PureDP(), parameter=1.0, delta=0.0), None),
    ],
    ids=repr,
)
def test_the_live_bound_is_that_of_the_audit_for_every_family(claim, tradeoff):
    recorder = recorded(claim, tradeoff=tradeoff)
    live, bound = recorder.live(), recorder.audit().bound
    assert live.epsilon == pytest.approx(bound.epsilon, rel=1e-9)
    assert live.epsilon > 0
    assert CHOSEN not in bound.assumptions


@pytest.mark.parametrize(
    ("params", "tradeoff"),
    [(SAMPLED, None), (NOISY, dpaudit.ApproximateDP()), (NOISY, None)],
    ids=["without noise", "another curve", "known"],
)
def test_an_audit_does_not_tune_bets_that_were_placed(params, tradeoff):
    known = {}
    claim = ReadClaim(lambda: params.overridden(DPSGDParams(**known)))
    recorder = recorded(claim, tradeoff=tradeoff)
    known["noise_multiplier"] = 1.0  # now it is known
    live, result = recorder.live(), recorder.audit()
    assert live.epsilon == pytest.approx(result.bound.epsilon, rel=1e-9)
    assert (
        result.bound.inference.expected
        == recorder.audit(inference=dpaudit.Betting()).bound.inference.expected
    )


def test_bets_on_another_curve_are_tuned_for_the_claim_if_it_is_known():
    claimed = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.05, num_steps=60, delta=DELTA)
    expected = claimed.hypothesis(dpaudit.ApproximateDP()).parameter
    recorder = recorded(read(NOISY), tradeoff=dpaudit.ApproximateDP())
    assert recorder.audit().bound.inference.expected == pytest.approx(expected)
    other = recorded(read(NOISY)).audit(tradeoff=dpaudit.ApproximateDP())
    assert other.bound.inference.expected == pytest.approx(expected)


def test_bets_that_a_user_passes_are_tuned_for_the_claim():
    result = dpaudit.audit(recorded().observations, claim=GAUSSIAN, inference=dpaudit.Betting())
    assert result.bound.inference.expected == 1.0


METHODS = [
    {"confidence": 0.9},
    {"tradeoff": dpaudit.ApproximateDP()},
    {"inference": dpaudit.JointExact()},
    {"inference": dpaudit.Betting(tails=0.0)},
    {"threshold": dpaudit.Fixed(0.7)},
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_another_method_after_a_bound_assumes_that_it_was_chosen_before(method):
    assert CHOSEN not in recorded().audit(**method).bound.assumptions
    recorder = recorded()
    recorder.live()
    assert CHOSEN in recorder.audit(**method).bound.assumptions
    assert CHOSEN in recorder.audit(**method).details()
    same = {"confidence": 0.95, "tradeoff": dpaudit.Gaussian(), "threshold": dpaudit.Fixed(0.5)}
    assert CHOSEN not in recorder.audit(inference=dpaudit.Betting(), **same).bound.assumptions


@pytest.mark.parametrize(
    ("num_steps", "ends"), [(80, "60 of 80 steps"), (None, "a run of unplanned length")], ids=repr
)
@pytest.mark.parametrize(
    "method", [{"inference": dpaudit.JointExact()}, {"threshold": dpaudit.HeldOut(0.2)}], ids=repr
)
def test_a_run_that_may_have_been_stopped_is_not_counted(num_steps, ends, method):
    recorder = recorded(num_steps=num_steps)
    assert recorder.audit(**method).estimate.noise_ratio is not None
    recorder.live()
    shown = repr(next(iter(method.values()))).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(
        dpaudit.InputError, match=f"after {ends} a bound .*: {shown} would not .* Use Betting.*num_steps="
    ):
        recorder.audit(**method)
    estimate = recorder.audit().estimate
    assert estimate.noise_multiplier is None
    assert "may have ended because of a bound" in estimate.missing
    assert estimate.roc is None


def test_a_run_with_its_planned_length_is_counted_whatever_was_shown():
    recorder = recorded(num_done=40)
    recorder.live()
    add(recorder, 20)
    assert recorder.audit(inference=dpaudit.JointExact()).estimate.missing is None


def test_a_resumed_run_keeps_its_bets_and_its_confidence():
    before = recorded(read(NOISY), num_done=40, confidence=0.9)
    state = before.state_dict()
    changed = Recorder(claim=read(DPSGDParams(noise_multiplier=3.0).overridden(SAMPLED)), num_steps=99)
    changed.load_state_dict(state)
    add(changed, 20)
    add(before, 20)
    assert changed.confidence == 0.9
    assert changed.audit().bound.inference == before.audit().bound.inference
    assert changed.audit().bound.parameter == before.audit().bound.parameter


def test_a_state_with_other_bets_is_refused():
    state = recorded().state_dict()
    recorder = Recorder(claim=GAUSSIAN, num_steps=60)
    with pytest.raises(dpaudit.InputError, match="These are the values of JointExact, not of Betting"):
        recorder.load_state_dict(state | {"betting": dpaudit.JointExact().to_dict()})
    with pytest.raises(dpaudit.InputError, match="that of a recorder, which bets: got Unheard"):
        recorder.load_state_dict(state | {"betting": {"type": "Unheard"}})


def test_a_state_of_another_number_of_canaries_is_refused_in_a_sentence():
    recorder = Recorder(claim=GAUSSIAN, num_steps=60, scorer=PerStep(num_canaries=1024))
    with pytest.raises(
        dpaudit.InputError, match=r"has 32 canaries, but this observer has 1024; pass num_canaries=32"
    ):
        recorder.load_state_dict(recorded().state_dict())
    recorder.load_state_dict(Recorder(claim=GAUSSIAN, num_steps=60).state_dict())

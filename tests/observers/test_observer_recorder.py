"""What an observer's recorder says before it judges."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import dpaudit
from dpaudit.canaries import ParameterLayout
from dpaudit.diagnostics import NoiseCheck, ObservedStep
from dpaudit.observers import observe_library
from dpaudit.observers._session import session
from dpaudit.recording import DPSGDParams, PerStep, ReadClaim, Recorder

NOTHING = DPSGDParams()
READ = DPSGDParams(noise_multiplier=1.0, sample_rate=0.05, delta=1e-5)


def observing(given=NOTHING, read=READ):
    claim = ReadClaim(lambda: read, given)
    return Recorder(claim=claim, num_steps=given.num_steps, checks=[NoiseCheck()], scorer=PerStep(signal=1.0))


def recorded(num_steps, given=NOTHING, read=READ):
    recorder, rng = observing(given, read), np.random.default_rng(0)
    for _ in range(num_steps):
        present = rng.random(16) < 0.5
        recorder.record(present + rng.standard_normal(16), present)
    return recorder


def test_a_training_that_did_not_run_is_told_as_such():
    with pytest.raises(dpaudit.InputError, match=r"No step was recorded\. Did training run\?"):
        recorded(0).audit()


def test_more_steps_than_claimed_are_refused():
    with pytest.raises(dpaudit.InputError, match="20 steps, but the claim covers num_steps=10"):
        recorded(20, DPSGDParams(num_steps=10)).audit()
    with pytest.raises(dpaudit.InputError, match="claim covers num_steps=15"):
        recorded(20).audit(num_steps=15)
    assert recorded(20, DPSGDParams(num_steps=20)).audit().verdict is not dpaudit.Verdict.VIOLATION


def test_a_training_without_noise_has_no_claim_of_its_own():
    silent = recorded(20, read=DPSGDParams(noise_multiplier=0.0, sample_rate=0.05, delta=1e-5))
    with pytest.raises(
        dpaudit.InputError, match="noise_multiplier must be positive, got 0: without noise there is no claim"
    ):
        silent.audit()
    assert silent.audit(noise_multiplier=1.0).claim.epsilon > 0


def test_an_epsilon_is_no_claim_without_the_numbers_of_the_steps():
    expected = r"epsilon=2\.0 alone does not determine .* pass noise_multiplier="
    for delta in (None, 1e-5):
        with pytest.raises(dpaudit.InputError, match=expected):
            recorded(20, read=NOTHING).audit(epsilon=2.0, delta=delta)
    with pytest.raises(dpaudit.InputError, match="delta is missing"):
        recorded(20, read=replace(READ, delta=None)).audit(epsilon=2.0)


@pytest.mark.parametrize("is_whole", [False, True], ids=["numbers", "claim"])
def test_an_epsilon_beside_the_numbers_is_compared_with_them(is_whole):
    numbers = {"noise_multiplier": 1.0, "sample_rate": 0.05, "num_steps": 20, "delta": 1e-5}
    given = {"claim": dpaudit.Claim.dpsgd(**numbers)} if is_whole else numbers
    with observe_library(library(), **given, epsilon=1.0) as recorder:
        assert [finding.name for finding in recorder.claim.facts.certain] == ["claimed-epsilon"]
    assert recorded(20).audit(epsilon=1.0).refuted == ("mechanism",)


def test_a_sample_rate_that_contradicts_the_training_is_told():
    for result in (recorded(20).audit(sample_rate=0.5), recorded(20, DPSGDParams(sample_rate=0.5)).audit()):
        assert "sample rate 0.5" in result.claim.summary
        assert "the claimed sample_rate=0.5 differs from the 0.05 of the training run" in result.details()


def test_a_sample_rate_that_is_rounded_otherwise_is_not_told():
    nothing_read = DPSGDParams(noise_multiplier=1.0, delta=1e-5)
    for result in (
        recorded(20).audit(sample_rate=0.0501),
        recorded(20, read=nothing_read).audit(sample_rate=0.5),
    ):
        assert not any("sample_rate" in text for text in result.not_covered)


def test_canaries_that_do_not_arrive_are_no_proof_of_anything():
    recorder, rng = observing(), np.random.default_rng(0)
    for _ in range(50):
        recorder.record(0.1 * rng.standard_normal(16), rng.random(16) < 0.5)
    with pytest.raises(dpaudit.InputError, match="or they were clipped together with other gradients"):
        recorder.audit()


LOOKS = [lambda seen: seen.live(), lambda seen: seen.curve([10]), lambda seen: seen.trajectory()]
NAMES = ["live", "curve", "trajectory"]


@pytest.mark.few(1)
@pytest.mark.parametrize("look", LOOKS, ids=NAMES)
def test_whoever_sees_the_bound_before_the_end_may_have_ended_the_run(look):
    recorder = recorded(20)
    before = recorder.audit().bound
    look(recorder)
    recorder.close()  # too late
    assert recorder.state_dict()["looked"]
    assert recorder.audit().bound == before  # bets hold at any time


@pytest.mark.parametrize("look", [*LOOKS, lambda seen: seen._repr_html_()], ids=[*NAMES, "notebook"])
def test_a_look_after_the_end_changes_nothing(look):
    recorder = recorded(20)
    before = replace(recorder.audit(), times=None).to_dict()
    recorder.close()
    look(recorder)
    assert replace(recorder.audit(), times=None).to_dict() == before


@pytest.mark.parametrize(
    "look",
    [*LOOKS, lambda seen: seen._repr_html_(), lambda seen: seen.audit()],
    ids=[*NAMES, "notebook", "audit"],
)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_whoever_sees_the_bound_of_an_end_and_goes_on_may_go_on_because_of_it(look, is_resumed):
    recorder = recorded(20)
    recorder.close()
    look(recorder)
    assert not recorder.state_dict()["looked"]
    if is_resumed:
        before, recorder = recorder, recorded(0)
        recorder.load_state_dict(before.state_dict())
    recorder.record(np.zeros(16), np.arange(16) < 8)
    assert recorder.state_dict()["looked"]
    assert recorder.audit().bound.method == "Betting(expected=1.0)"


def test_an_end_that_was_none_hides_the_bound_again():
    recorder = recorded(20)
    recorder.close()
    recorder.record(np.zeros(16), np.arange(16) < 8)
    assert not recorder.state_dict()["looked"]
    assert "epsilon &gt;=" not in recorder._repr_html_()
    assert recorder.audit().bound.method == "Betting(expected=1.0)"


def test_a_run_of_a_length_that_nobody_planned_is_not_over_at_any_number_of_steps():
    recorder = recorded(1000)
    assert recorder.live().epsilon == recorder.audit().bound.epsilon
    assert recorder.state_dict()["looked"]


def test_a_notebook_that_shows_a_running_recorder_does_not_look():
    recorder = recorded(20)
    shown = recorder._repr_html_()
    assert "epsilon &gt;=" not in shown
    assert "live() shows it" in shown
    assert not recorder.state_dict()["looked"]
    recorder.live()
    assert "epsilon &gt;=" in recorder._repr_html_()


class EndError(Exception):
    pass


@pytest.mark.parametrize("error", [None, EndError])
def test_a_with_block_closes_its_recorder_however_it_ends(error):
    @session
    def observing():
        yield recorded(20)

    with pytest.raises(EndError) if error else nullcontext(), observing() as recorder:
        assert "epsilon &gt;=" not in recorder._repr_html_()
        if error:
            raise error
    recorder.live()
    assert not recorder.state_dict()["looked"]


CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=2.0, sample_rate=0.1, num_steps=50, delta=1e-6)


def library():
    return SimpleNamespace(
        layout=ParameterLayout.of([100]), claimed=lambda: READ, install=lambda _: nullcontext()
    )


def test_a_claim_is_its_numbers_and_takes_precedence_over_those_that_are_read():
    numbers = {part.name: part.value for part in CLAIM.parts}
    for options in ({"claim": CLAIM}, numbers):
        with observe_library(library(), **options) as recorder:
            assert recorder.claim.summary == CLAIM.summary
        for rng in map(np.random.default_rng, range(51)):
            recorder.record(np.zeros(64), rng.random(64) < 0.5)
        with pytest.raises(dpaudit.InputError, match="claim covers num_steps=50"):
            recorder.audit()
    step = dpaudit.Claim.gaussian(noise_multiplier=2.0, delta=1e-6)
    with observe_library(library(), claim=step) as recorder:
        assert recorder.claim is step


@pytest.mark.parametrize("name", ["noise_multiplier", "sample_rate", "num_steps", "delta"])
def test_a_claim_and_one_of_its_numbers_are_refused(name):
    with pytest.raises(dpaudit.InputError, match=f"Pass either claim=... or {name}=..., not both"):
        observe_library(library(), claim=CLAIM, **{name: 1}).start()


def test_options_that_no_observer_has_are_refused_at_once():
    with pytest.raises(TypeError, match=r"observe_library\(\) got an unexpected keyword argument 'canarys'"):
        observe_library(library(), canarys=3)
    with pytest.raises(dpaudit.InputError, match=r"target_epsilon=8 alone does not determine"):
        observe_library(library(), target_epsilon=8)
    with pytest.raises(
        dpaudit.InputError, match=r"claim must be a Claim such as Claim\.dpsgd\(\.\.\.\), got 8\.0"
    ):
        observe_library(library(), claim=8.0).start()


def test_releases_that_make_one_step_add_up():
    first, second = (
        ObservedStep(
            scores=np.array([1.0, 0.0]),
            present=np.array([True, False]),
            noise=np.array([value]),
            weights=np.array([value]),
            num_rows=rows,
            max_row_norm=value,
            example_sum_norm=value,
            sum_limit=rows,
            sum_norm=1.0,
            row_digests=np.array([rows]),
            has_padding=rows == 3,
        )
        for value, rows in ((0.5, 2), (0.25, 3))
    )
    step = ObservedStep.accumulated([first, second])
    assert step.scores.tolist() == [2.0, 0.0]
    assert (step.noise.item(), step.weights.item(), step.num_rows) == (0.75, 0.5, 5)
    assert (step.max_row_norm, step.example_sum_norm, step.sum_limit) == (0.5, 0.75, 5)
    assert step.sum_excess == 0.25  # of the first sum, in norms a row
    assert step.row_digests.tolist() == [2, 3]
    assert step.has_padding
    assert step.sum_norm is None  # norms do not add up
    assert ObservedStep.accumulated([first]) is first

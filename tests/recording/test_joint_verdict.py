"""One verdict from bound and tests: the shares of the error, what is refuted, and what is not covered."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from statistical_limits import most_flagged

import dpaudit
from dpaudit.diagnostics import (
    CheckResults,
    ClaimedStep,
    CoordinateSample,
    Diagnosis,
    Finding,
    NoiseCheck,
    ObservedStep,
)
from dpaudit.diagnostics._diagnosis import joint_causes
from dpaudit.observers._replay_result import ReplayResult
from dpaudit.recording import DPSGDParams, PerStep, ReadClaim, Recorder, TrainingInfo, WholeRun

COUNT = 32
READ = DPSGDParams(
    noise_multiplier=1.0, sample_rate=0.05, origins={"noise_multiplier": "the optimizer", "sample_rate": "x"}
)
GIVEN = DPSGDParams(delta=1e-5)
CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def recorded(
    level: Any = 1.0, *, num_steps: int = 60, seed: int = 0, planned: int | None = None, **parts: Any
) -> Recorder:
    """What an observer would have recorded of steps with this noise, a number or one per step."""
    options: dict[str, Any] = {"claim": CLAIM, "checks": [NoiseCheck()]}
    options |= {"num_steps": planned, "scorer": PerStep(signal=1.0)} | parts
    recorder, rng = Recorder(**options), np.random.default_rng(seed)
    levels = np.broadcast_to(level, num_steps)
    for index in range(num_steps):
        drawn, present = levels[index] * rng.standard_normal(COUNT), rng.random(COUNT) < 0.5
        if recorder.tests_noise:
            recorder.observe(ObservedStep.of_release(drawn, np.zeros(COUNT), leaves=(COUNT // 2, COUNT // 2)))
        recorder.record(drawn + present, present)
    return recorder


def continued(recorder: Recorder, rng: np.random.Generator, num_steps: int = 30) -> None:
    """Record steps with the claimed noise."""
    for _ in range(num_steps):
        drawn, present = rng.standard_normal(COUNT), rng.random(COUNT) < 0.5
        recorder.observe(ObservedStep.of_release(drawn, np.zeros(COUNT), leaves=(COUNT // 2, COUNT // 2)))
        recorder.record(drawn + present, present)


def test_what_was_done_with_the_data_before_the_observed_steps_is_never_covered() -> None:
    gaps = recorded().audit().not_covered
    assert any(
        "before training (encodings, a vocabulary, normalization), and earlier phases" in gap for gap in gaps
    )


def one_missing() -> Any:
    """One step without noise, of which scores show nothing."""
    return np.where(np.arange(60) == 30, 0.0, 1.0)


class Certain:
    """A check that finds something without statistics."""

    def results(self, claimed: ClaimedStep) -> CheckResults:  # noqa: ARG002
        found = Finding.certain("sum-norm", "The sum is longer than its rows allow.")
        return CheckResults(certain=(found,), not_covered=("the loader is not tested",))


def test_bound_and_tests_share_the_error_and_say_so() -> None:
    result = recorded().audit()
    assert result.verdict is not dpaudit.Verdict.VIOLATION
    assert result.bound.confidence == pytest.approx(0.96)
    assert result.diagnosis is not None
    assert result.diagnosis.confidence == pytest.approx(0.99)
    assert result.confidence == 0.95
    assert "errors: 5 % in total: 4 % for the bound, 1 % for " in result.details()
    assert result.refuted == ()
    assert result.likely_causes() == ()
    other = recorded().audit(confidence=0.9)
    assert other.bound.confidence == pytest.approx(0.92)
    assert other.confidence == 0.9


def test_the_power_is_that_of_the_bound_with_its_share() -> None:
    shared, whole = recorded().audit(), recorded(tests=False).audit()
    assert shared.power.parameter > whole.power.parameter
    assert recorded().audit(confidence=0.9375).power == whole.power  # a bound of 95 %


def test_without_tests_the_bound_has_the_whole_error() -> None:
    result = recorded(tests=False).audit()
    assert result.bound.confidence == 0.95
    assert result.diagnosis is None
    assert "the noise is not tested: the audit was set up with tests=False" in result.not_covered
    with pytest.raises(
        dpaudit.InputError, match="There is no noise to test, because the audit was made with tests=False"
    ):
        recorded(tests=False).diagnose()


def test_audit_may_skip_the_tests_and_the_bound_keeps_its_share() -> None:
    recorder = recorded(one_missing())
    tested, skipped = recorder.audit(), recorder.audit(tests=False)
    assert tested.verdict is dpaudit.Verdict.VIOLATION
    assert skipped.verdict is not dpaudit.Verdict.VIOLATION
    assert skipped.bound == tested.bound
    assert skipped.diagnosis is None
    assert any("audit() was called with tests=False" in gap for gap in skipped.not_covered)
    assert str(recorder.audit(tests=True).diagnosis) == str(tested.diagnosis)
    with pytest.raises(dpaudit.InputError, match="tests must be False, which skips the tests"):
        recorder.audit(tests="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sample_rate": 2}, "sample_rate must be above 0 and at most 1, got 2"),
        ({"delta": 2}, "delta must be at least 0 and below 1, got 2"),
        ({"noise_multiplier": 0}, "noise_multiplier must be positive, got 0"),
        ({"noise_multiplier": -1}, "noise_multiplier must be positive, got -1"),
        ({"num_steps": 1.5}, "num_steps must be a whole number, got 1.5"),
    ],
)
def test_numbers_of_a_claim_are_checked_before_the_first_step(given: Any, sentence: str) -> None:
    with pytest.raises(dpaudit.InputError, match=sentence):
        ReadClaim(DPSGDParams, DPSGDParams(**given))


def test_whether_to_test_is_checked_before_the_first_step() -> None:
    with pytest.raises(dpaudit.InputError, match="tests must be True or False, got 'no'"):
        recorded(tests="no")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"checks": []}, "only the scores of this run were recorded"),
        ({"claim": dpaudit.Claim.approximate_dp(epsilon=8.0, delta=1e-5)}, "not about Gaussian noise"),
    ],
)
def test_nothing_to_test_costs_no_error(parts: dict[str, Any], expected: str) -> None:
    result = recorded(**parts).audit()
    assert result.bound.confidence == 0.95
    assert any(expected in text for text in result.not_covered)


def test_findings_alone_refute_the_mechanism_not_the_privacy() -> None:
    result = recorded(one_missing()).audit()
    assert result.verdict is dpaudit.Verdict.VIOLATION
    assert result.refuted == ("mechanism",)
    assert result.findings[0].name == "step-noise"
    assert result.sentence.startswith(
        "This is not the mechanism that the claim was computed for. The bound alone does not"
    )
    assert f"finding: {result.findings[0]}" in result.details()
    assert "empty batch" in result.likely_causes()[0]
    with pytest.raises(dpaudit.ViolationError, match="cause    Is a step released without noise"):
        result.raise_for_violation()


def test_a_bound_above_the_claim_refutes_the_privacy() -> None:
    result = recorded(0.5, tests=False, num_steps=200).audit()
    assert result.refuted == ("privacy",)
    assert result.sentence == dpaudit.Verdict.VIOLATION.value
    both = recorded(0.5, num_steps=200).audit()
    assert both.refuted == ("privacy", "mechanism")
    assert both.sentence.endswith("This is not the mechanism that the claim was computed for.")
    assert "the noise is 50 % of the claimed level" in both.likely_causes()[0]


def test_an_unclipped_canary_has_its_cause_in_every_result() -> None:
    rng, facts = np.random.default_rng(0), TrainingInfo(canary=dpaudit.Dirac(), max_grad_norm=1.0)
    recorder = Recorder(claim=CLAIM, num_steps=60, facts=lambda: facts)
    for _ in range(60):
        present = rng.random(COUNT) < 0.5
        recorder.record(10 * present + rng.standard_normal(COUNT), present)
    assert "reaches the release unclipped" in recorder.audit().likely_causes()[0]


@pytest.mark.parametrize(
    ("ends", "change"),
    [((1.0, 0.5), "shrinks during the run, from 9"), ((0.5, 1.0), "grows during the run, from 5")],
)
def test_noise_that_changes_over_time_is_described_by_its_trend(ends: Any, change: str) -> None:
    first = recorded(np.linspace(*ends, 200), num_steps=200).audit().likely_causes()[0]
    assert f"the noise {change}" in first
    assert "empty batch" not in first


def test_a_parameter_without_noise_is_named() -> None:
    rng, tests = np.random.default_rng(0), dpaudit.Diagnostics()
    for _ in range(60):
        noise = rng.standard_normal(COUNT) * np.where(np.arange(COUNT) < 8, 0.1, 1.0)
        tests.observe_noise(noise, {"fc.bias": 8, "fc.weight": 24})
    assert joint_causes(tests.diagnose(), {})[0].startswith("is fc.bias skipped")


def test_names_of_an_observer_reach_the_findings() -> None:
    for names, expected in ((["fc.bias", "fc.weight"], "fc.bias"), (["the same", "the same"], "0")):
        check, rng = NoiseCheck(), np.random.default_rng(0)
        leaves = CoordinateSample.of([8, COUNT - 8]).named(names)
        for _ in range(60):
            noise = rng.standard_normal(COUNT) * np.where(np.arange(COUNT) < 8, 0.1, 1.0)
            check.observe(ObservedStep(noise=noise, leaves=leaves))
        results = check.results(ClaimedStep(noise_multiplier=1.0, confidence=0.99))
        diagnosis = Diagnosis.of(results.checks, confidence=0.99)
        assert f"The noise of leaf {expected} is 9." in str(diagnosis)


def test_a_run_that_may_have_stopped_because_of_its_bound_has_a_verdict_without_tests() -> None:
    recorder = recorded(checks=[Certain()])
    recorder.live()
    for _ in range(2):
        present = np.arange(COUNT) % 2 == 0
        recorder.record(1.0 * present, present)
    result = recorder.audit()
    assert result.diagnosis is not None
    assert result.diagnosis.checks == ()
    assert [finding.name for finding in result.findings] == ["sum-norm"]  # needs no statistics
    assert any("may have ended because of its noise" in text for text in result.not_covered)
    assert result.bound.confidence == pytest.approx(0.96)  # the bets were placed before


def test_facts_without_statistics_join_and_are_plain_json() -> None:
    result = recorded(checks=[Certain()]).audit()
    assert result.refuted == ("mechanism",)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["verdict"] == "VIOLATION"
    assert values["refuted"] == ["mechanism"]
    assert values["diagnosis"]["findings"][0]["estimate"] is None
    assert values["diagnosis"]["confidence"] == pytest.approx(0.99)
    assert "the loader is not tested" in values["not_covered"]


def test_what_is_not_covered_is_never_empty() -> None:
    for options in ({}, {"checks": []}, {"tests": False}):
        result = recorded(**options).audit()
        said = any("it may be smaller in other directions" in text for text in result.not_covered)
        assert said == (not options)  # where the noise is tested
        assert any(text.startswith("how batches are drawn: ") for text in result.not_covered)
        assert any("besides the noisy gradients of the observed steps" in text for text in result.not_covered)
        assert any(text.startswith("gradients that depend on other examples") for text in result.not_covered)
        assert any("can be predicted from a seed" in text for text in result.not_covered)
    scores = dpaudit.Observations(with_canary=np.ones(30), without_canary=np.zeros(30))
    assert dpaudit.audit(scores, claim=CLAIM).not_covered


def test_a_replay_among_the_checks_covers_coupled_examples() -> None:
    replayed = ReplayResult(checks=(), findings=())
    result = recorded(checks=[replayed]).audit()
    assert not any("other examples of the batch" in text for text in result.not_covered)


def test_tests_of_the_developer_share_the_error_of_a_recorder_without_noise() -> None:
    rng, tests = np.random.default_rng(0), dpaudit.Diagnostics(sample_rate=0.05)
    for _ in range(60):
        tests.observe_noise(0.5 * rng.standard_normal(COUNT))
        tests.observe_batch(np.flatnonzero(rng.random(400) < 0.05), num_examples=400)
    result = recorded(checks=[]).audit(tests=tests)
    assert result.refuted == ("mechanism",)
    assert result.confidence == 0.95
    assert result.bound.confidence == pytest.approx(0.96)
    assert not any("batches are drawn" in text for text in result.not_covered)


def test_tests_of_the_developer_join_those_of_the_recorder() -> None:
    tests = dpaudit.Diagnostics(sample_rate=0.05)
    for _ in range(60):
        tests.observe_batch_size(20, num_examples=400)
    result = recorded().audit(tests=tests)
    assert result.diagnosis is not None
    names = [check.name for check in result.diagnosis.checks]
    assert len(names) == len(set(names))
    assert {"noise-variance", "batch-sizes"} <= set(names)
    assert result.refuted == ("mechanism",)


def test_a_resumed_run_has_the_bound_and_the_confidence_that_it_began_with() -> None:
    recorder, resumed = recorded(), recorded(num_steps=0)
    state = recorder.state_dict()
    resumed.load_state_dict(state)
    assert resumed.audit().bound == recorder.audit().bound
    assert resumed.confidence == 0.95
    del state["joint_confidence"]
    with pytest.raises(dpaudit.errors.InputError, match="The state_dict of a recorder"):
        resumed.load_state_dict(state)


def test_each_part_of_a_claim_says_where_it_comes_from() -> None:
    recorder = recorded(claim=ReadClaim(lambda: READ, GIVEN))
    expected = (
        "noise_multiplier=1 (read from the optimizer), sample_rate=0.05 (read from x), "
        "num_steps=60 (by default the number of recorded steps), delta=1e-05 (given)"
    )
    assert f"claimed: {expected}" in recorder.audit().details()
    given = recorder.audit(noise_multiplier=1.0)
    sources = {part["name"]: part["source"] for part in given.to_dict()["claim"]["parts"]}
    assert sources == {
        "noise_multiplier": "given",
        "sample_rate": "read",
        "num_steps": "default",
        "delta": "given",
    }
    assert "(given)" not in recorded().audit().details()  # where all is given, nothing needs to be said


def test_whole_runs_share_the_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, bound_alone = [], recorded(tests=False).audit()

    def audit(*_: Any, confidence: float, **__: Any) -> dpaudit.Result:
        levels.append(confidence)  # the curve of a whole run takes seconds
        return bound_alone

    monkeypatch.setattr("dpaudit.recording._whole_run.audit_recorded", audit)
    rng, present = np.random.default_rng(0), np.arange(COUNT) % 2 == 0
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.5, num_steps=40, delta=1e-5)
    for tests in (True, False):
        recorder = Recorder(
            claim=claim, num_steps=40, scorer=WholeRun(present), checks=[NoiseCheck()], tests=tests
        )
        for index in range(40):
            noise = (index != 20) * rng.standard_normal(COUNT)
            recorder.observe(ObservedStep.of_release(noise, np.zeros(COUNT), leaves=(COUNT,)))
            recorder.record(noise)
        result = recorder.audit()
        assert result.refuted == (("mechanism",) if tests else ())
        assert not any("batches are drawn" in text for text in result.not_covered)
    assert levels == pytest.approx([0.96, 0.95])


@pytest.mark.parametrize("name", ["epsilon", "target_epsilon"])
def test_an_epsilon_is_answered_by_what_to_pass(name: str) -> None:
    from dpaudit.observers.step import observe_loss_step, observe_step  # noqa: PLC0415

    scores = dpaudit.Observations(with_canary=np.ones(30), without_canary=np.zeros(30))
    calls: list[Any] = [
        lambda **options: dpaudit.audit(scores, **options),
        lambda **options: observe_step(lambda rows: rows, np.zeros((1, 4)), **options),
        lambda **options: observe_loss_step(lambda loss: loss, None, None, None, **options),
    ]
    for call in calls:
        with pytest.raises(
            dpaudit.InputError, match=rf"{name}=8\.0 alone does not determine .* pass claim=.*, such as Claim"
        ):
            call(**{name: 8.0})


def test_correct_runs_are_violations_no_more_often_than_bound_and_tests_allow(is_long: bool) -> None:
    runs = 1000 if is_long else 60
    flagged = sum(
        recorded(seed=seed, num_steps=30).audit().verdict is dpaudit.Verdict.VIOLATION for seed in range(runs)
    )
    assert flagged <= most_flagged(runs, 0.05, broken=0.3)


def test_a_diagnosis_that_is_joined_makes_a_violation() -> None:
    result = recorded(tests=False).audit()
    found = Finding.certain("sum-norm", "It is longer.")
    assert replace(result, diagnosis=Diagnosis.of((), confidence=0.99)).verdict is result.verdict
    refuted = replace(result, diagnosis=Diagnosis.of((), confidence=0.99, certain=[found]))
    assert refuted.refuted == ("mechanism",)
    assert refuted.verdict is dpaudit.Verdict.VIOLATION
    assert refuted.p_value == 0


def test_a_score_that_is_not_finite_may_be_an_overflow_in_the_first_step() -> None:
    recorder = Recorder(claim=CLAIM, num_steps=2)
    with pytest.raises(
        dpaudit.InputError,
        match=r"Scores must be finite, got scores\[1\]=nan in step 0\. Did training diverge,",
    ):
        recorder.record([0.0, np.nan], [False, True])
    recorder.record([0.0, 1.0], [False, True])
    with pytest.raises(dpaudit.InputError, match=r"step 1. Did training diverge\?$"):
        recorder.record([0.0, np.nan], [False, True])


def test_tests_of_several_audits_have_their_error_rate_once() -> None:
    """Before, an audit in the middle of a planned run and one at its end had 1 % each."""
    recorder, spent = recorded(num_steps=30, planned=60), []
    for _ in range(2):  # the same steps again are the same test
        middle = recorder.audit()
        assert middle.diagnosis is not None
        assert any("before the planned end" in note for note in middle.notes)
        spent.append(1 - middle.diagnosis.confidence)
    resumed = Recorder(claim=CLAIM, checks=[NoiseCheck()], num_steps=60, scorer=PerStep(signal=1.0))
    resumed.load_state_dict(recorder.state_dict())
    rng = np.random.default_rng(5)
    for running in (recorder, resumed):
        continued(running, rng)
        end = running.audit()
        assert end.diagnosis is not None
        assert not any("before the planned end" in note for note in end.notes)
        assert spent == pytest.approx([0.005, 0.005])
        assert 1 - end.diagnosis.confidence == pytest.approx(0.005)
        assert "4.5 % in total: 4 % for the bound, 0.5 % for" in end.details()


@pytest.mark.parametrize("planned", [30, 60, None])
def test_an_audit_that_no_other_with_tests_can_follow_has_all_of_their_error_rate(
    planned: int | None,
) -> None:
    recorder = recorded(num_steps=30, planned=planned)
    if planned == 60:
        recorder.close()
    result = recorder.audit()
    assert result.diagnosis is not None
    assert result.diagnosis.confidence == pytest.approx(0.99)


def test_a_run_that_continues_after_its_last_audit_has_no_error_rate_left_for_tests() -> None:
    recorder, rng = recorded(num_steps=30, planned=60), np.random.default_rng(5)
    recorder.close()
    recorder.audit()
    continued(recorder, rng)
    result = recorder.audit()
    assert result.diagnosis is None
    assert any("has spent the error rate of the tests" in gap for gap in result.not_covered)


def test_a_run_that_continues_after_a_bound_at_its_end_may_have_stopped_because_of_it() -> None:
    recorder = recorded(num_steps=30, planned=30)
    assert not recorder.live().is_violation
    continued(recorder, np.random.default_rng(5))
    assert any("may have ended because of its noise" in gap for gap in recorder.audit().not_covered)


def test_a_whole_run_that_continues_is_not_tested_again() -> None:
    scorer = WholeRun(np.arange(COUNT) % 2 == 0)
    claim = ReadClaim(lambda: READ, GIVEN)
    recorder = Recorder(claim=claim, num_steps=None, scorer=scorer, checks=[NoiseCheck()])
    rng, tested = np.random.default_rng(0), []
    for _ in range(2):
        for _ in range(30):
            drawn = rng.standard_normal(COUNT)
            recorder.observe(ObservedStep.of_release(drawn, np.zeros(COUNT), leaves=(COUNT // 2, COUNT // 2)))
            recorder.record(drawn)
        tested += [recorder.audit().diagnosis is not None, recorder.audit().diagnosis is not None]
    assert tested == [True, True, False, False]

"""Entries are judged with one error rate, kept when they are done, and taken up again."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dpaudit import Claim
from dpaudit.diagnostics import Diagnostics, Finding
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.observers.step import observe_step
from dpaudit.zoo import (
    ENTRIES,
    ENTRIES_FOUND_BY_TESTS,
    Entry,
    Evidence,
    Replay,
    Scores,
    chosen,
    examine_entry,
    judge,
    run_zoo,
)

CLAIM = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
STEPS = 60


def simulated(noise, *, num_steps=STEPS, num_canaries=64, seed=0):
    """Scores and noise of Gaussian steps that claim a noise multiplier of 1."""
    rng = np.random.default_rng(seed)
    present = rng.random((num_steps, num_canaries)) < 0.5
    values = present + noise * rng.standard_normal(present.shape)
    record = Diagnostics()
    for _ in range(num_steps):
        record.observe_noise(noise * rng.standard_normal(20))
    scores = Scores(values=values, present=present)
    return Evidence(claim=CLAIM, num_steps=num_steps, scores=scores, diagnostics={num_steps: record})


def entry(name="quiet", calls=None, **changes):
    def scenario(is_broken, seed):
        if calls is not None:
            calls.append((name, is_broken))
        return simulated(0.5 if is_broken else 1.0, seed=seed)

    usual = Entry(name=name, public="here", wrong="Too quiet.", kind="simulated", scenario=scenario)
    return replace(usual, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What is kept of a finished entry of seed 3."""
    folder = tmp_path_factory.mktemp("finished")
    run_zoo([entry()], seed=3, output=folder)
    return (folder / "quiet.json").read_text()


@pytest.fixture
def kept(tmp_path, finished):
    """The file of a finished entry, in a folder of its own."""
    file = tmp_path / "quiet.json"
    file.write_text(finished)
    return file


def test_bound_and_tests_share_the_error():
    judged = judge(simulated(1.0))
    errors = 1 - judged.result.bound.confidence, 1 - judged.diagnosis.confidence
    assert errors == (pytest.approx(0.04), pytest.approx(0.01))
    assert judged.caught_by == ()


def test_one_kind_of_evidence_alone_has_all_of_the_error():
    both = simulated(1.0)
    bound = judge(replace(both, diagnostics={}))
    tests = judge(replace(both, scores=None))
    assert bound.result.bound.confidence == pytest.approx(0.95)
    assert tests.diagnosis.confidence == pytest.approx(0.95)


def test_too_little_noise_is_caught_by_bound_and_tests_with_few_steps():
    judged = judge(simulated(0.5), in_depth=True)
    assert judged.caught_by == ("bound", "noise-variance")
    assert judged.bound_steps <= 20
    by_name = {method.name: method for method in judged.methods}
    assert list(by_name)[:5] == [
        "f-DP(CP)",
        "f-DP(ZB)",
        "(eps,delta)(CP)",
        "(eps,delta)(ZB)",
        "eps-DP(Katz)",
    ]
    assert by_name["f-DP(joint)"].is_violation
    assert by_name["f-DP(joint)"].steps_needed <= 20
    assert not by_name["(eps,delta)(CP)"].is_violation
    assert by_name["(eps,delta)(CP)"].steps_needed is None


def test_a_replay_needs_one_step():
    judged = judge(Evidence(claim=CLAIM, num_steps=1, replay=Replay("It moves by 2.", True)))
    assert judged.caught_by == ("replay",)
    assert judged.steps_needed == 1


def observed(noise, seed=0):
    """A step that claims a noise multiplier of 1, as its observer recorded it."""
    rng = np.random.default_rng(seed)

    def step(rows):
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return (rows / np.maximum(1.0, norms)).sum(axis=0) + noise * rng.standard_normal(rows.shape[1])

    recorder = observe_step(
        step, np.zeros((0, 128)), claim=CLAIM, max_grad_norm=1.0, num_steps=STEPS, seed=seed
    )
    return Evidence(claim=CLAIM, num_steps=STEPS, recorder=recorder)


def test_the_record_of_an_observer_is_judged_with_its_tests_at_one_error_rate():
    judged = judge(observed(0.5), in_depth=True)
    assert judged.caught_by[0] == "bound"
    assert "noise-variance" in judged.caught_by
    assert judged.bound_steps <= 50
    assert judged.tests_steps == STEPS
    assert judged.steps_needed == judged.bound_steps
    assert judged.methods == ()
    errors = 1 - judged.result.bound.confidence, 1 - judged.diagnosis.confidence
    assert errors == (pytest.approx(0.04), pytest.approx(0.01))
    json.dumps(judged.to_dict(), allow_nan=False)


def test_the_record_of_a_correct_step_is_not_flagged():
    judged = judge(observed(1.0), in_depth=True)
    assert judged.caught_by == ()
    assert judged.steps_needed is None


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_fact_has_a_name_and_needs_no_statistics(num_steps):
    fact = Finding.certain("batch-sampler", "Batches have one size.")
    judged = judge(Evidence(claim=CLAIM, num_steps=num_steps, certain=(fact,)))
    assert judged.caught_by == ("batch-sampler",)
    assert judged.steps_needed == num_steps
    assert judged.to_dict()["certain"] == [{"name": fact.name, "sentence": fact.sentence}]
    assert judge(Evidence(claim=CLAIM, num_steps=num_steps)).caught_by == ()


def test_every_entry_has_a_fix_and_those_found_by_tests_a_family():
    for faulty in ENTRIES:
        assert faulty.fix.endswith("."), faulty.name
        assert faulty.wrong.endswith("."), faulty.name
    families = Counter(faulty.family for faulty in ENTRIES_FOUND_BY_TESTS)
    assert len(families) == 10
    assert min(families.values()) >= 2


def test_a_finished_entry_is_taken_up_and_an_unfinished_one_is_run(tmp_path):
    calls = []
    first, second = entry("one", calls), entry("two", calls)
    run_zoo([first], seed=3, output=tmp_path)
    whole = run_zoo([first, second], seed=3, output=tmp_path)
    assert calls == [("one", True), ("one", False), ("two", True), ("two", False)]
    assert whole == run_zoo([first, second], seed=3, output=tmp_path)
    assert [one["name"] for one in whole["entries"]] == ["one", "two"]
    assert whole["is_as_expected"]
    json.dumps(whole, allow_nan=False)


@pytest.mark.parametrize(
    "name", ["seed", "dpaudit_version", "torch_version", "opacus_version", "twin_confidence"]
)
def test_what_is_left_of_another_seed_or_version_is_refused(kept, name):
    values = json.loads(kept.read_text())
    assert values[name]
    kept.write_text(json.dumps(values | {name: "0.0.1"}))
    with pytest.raises(
        InputError, match=rf"was made otherwise: {name} is .* stored \"0\.0\.1\"; choose another --output"
    ):
        run_zoo([entry()], seed=3, output=kept.parent)


def test_a_file_that_lacks_something_is_refused(kept):
    values = json.loads(kept.read_text())
    del values["is_as_expected"]
    kept.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"quiet\.json is damaged: .* Delete it"):
        run_zoo([entry()], seed=3, output=kept.parent)


def test_all_twins_of_the_zoo_share_the_error_whichever_are_run(tmp_path):
    found = run_zoo([entry()], seed=0, output=tmp_path)
    assert found["twin_confidence"] == pytest.approx(1 - 0.05 / len(ENTRIES))
    (one,) = found["entries"]
    levels = [1 - one["correct"][what]["confidence"] for what in ("bound", "tests")]
    assert sum(levels) == pytest.approx(0.05 / len(ENTRIES))
    assert 1 - one["broken"]["bound"]["confidence"] == pytest.approx(0.04)


def test_an_entry_that_breaks_off_leaves_nothing_behind(tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_zoo([entry("one"), entry("two", scenario=interrupted)], seed=0, output=tmp_path)
    assert [path.name for path in tmp_path.glob("*.json")] == ["one.json"]


def test_a_missing_library_is_reported_and_not_kept(tmp_path):
    def missing(*_):
        raise MissingExtraError("This", "opacus")

    found = run_zoo([entry(scenario=missing)], seed=0, output=tmp_path)
    assert "opacus" in found["entries"][0]["left_out"]
    assert found["is_as_expected"]
    assert not list(tmp_path.glob("*.json"))


def test_an_entry_that_is_not_caught_is_only_as_expected_if_a_reason_is_known():
    def silent(_, seed):
        return simulated(1.0, seed=seed)

    assert not examine_entry(entry(scenario=silent), seed=0)["is_as_expected"]
    assert examine_entry(entry(scenario=silent, not_caught="It leaks nothing."), seed=0)["is_as_expected"]


def test_a_flagged_twin_is_not_as_expected():
    def loud(_, seed):
        return simulated(0.5, seed=seed)

    assert not examine_entry(entry(scenario=loud), seed=0)["is_as_expected"]


def test_entries_have_names_and_seeds_of_their_own():
    seeds = []
    for name in ("one", "two"):
        entry(name, scenario=lambda _, seed: seeds.append(seed)).observe(is_broken=True, seed=0)
    assert seeds[0] != seeds[1]
    assert len({one.name for one in ENTRIES}) == len(ENTRIES)


def test_an_unknown_name_is_told_with_those_that_are_known():
    assert [one.name for one in chosen(ENTRIES, ["noise-too-small"])] == ["noise-too-small"]
    with pytest.raises(InputError, match=r"The zoo has no entry 'nosie'\. List all with: "):
        chosen(ENTRIES, ["nosie"])

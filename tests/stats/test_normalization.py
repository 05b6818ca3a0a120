"""Scores that are not as normalized as declared get one sentence, wherever a result is shown."""

import re

import numpy as np
import pytest

import dpaudit
from dpaudit.methods import examine
from dpaudit.recording import PerStep
from dpaudit.report import Run
from dpaudit.stats._estimate import scale_notes

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def step_scores(seed=0, shape=(200, 32), noise=0.7):
    rng = np.random.default_rng(seed)
    present = rng.random(shape) < 0.5
    return present + noise * rng.standard_normal(shape), present


def observed(scores, present):
    return dpaudit.Observations.from_presence(scores, present, normalized=True)


def test_a_forgotten_factor_is_named():
    scores, present = step_scores()
    result = dpaudit.audit(observed(scores / 256, present), claim=CLAIM)
    assert result.bound.parameter == 0
    (note,) = result.notes
    assert "a mean of 0 without the canary and of 1 with it" in note
    assert "0.0039" in note
    assert "a missing factor of 25" in note
    assert f"note: {note}" in result.details()
    assert note in result._repr_html_()
    assert result.to_dict()["notes"] == [note]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            lambda scores, present: scores + 9.0 * present,
            "clipped to the claimed norm, or .* factor of 0.1",
        ),
        (lambda scores, _: scores + 0.5, "subtract what the release contains"),
        (lambda scores, present: scores - present, "check that canaries reach the release"),
        (lambda scores, _: 1 - scores, "a higher score means present"),
    ],
)
def test_other_means_have_other_causes(change, cause):
    scores, present = step_scores()
    (note,) = scale_notes(observed(change(scores, present), present))
    assert re.search(cause, note)


def test_correct_scores_get_no_note():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        shape = (int(rng.integers(2, 60)), int(rng.integers(4, 30)))
        present, noise = rng.random(shape) < 0.5, rng.choice([0.3, 3.0])
        # the noise of a step is shared, as with inputs that overlap: its scores are not independent
        shared = np.repeat(rng.standard_normal((shape[0], 1)), shape[1], axis=1)
        assert scale_notes(observed(present + noise * shared, present)) == ()
        one = np.arange(shape[0]) % 2
        assert scale_notes(observed(one + noise * shared[:, 0], one)) == ()


def test_scores_that_are_not_declared_as_normalized_get_no_note():
    scores, present = step_scores()
    assert scale_notes(dpaudit.Observations.from_presence(scores / 256, present)) == ()


def test_a_recorder_knows_canaries_that_are_shorter_than_the_clipping_norm():
    scores, present = step_scores(noise=0.1)
    notes = []
    for signal in (None, 0.4):
        recorder = dpaudit.Recorder(claim=CLAIM, num_steps=200, scorer=PerStep(signal=signal))
        for row, mask in zip(scores, present, strict=True):
            recorder.record(row - 0.6 * mask, mask)
        notes.append(recorder.audit().notes)
    assert "of 1 with it, but these have" in notes[0][0]
    assert notes[1] == ()


def test_files_are_sampled_in_bounded_memory(tmp_path):
    rng = np.random.default_rng(0)
    for name, mean in (("a", 1.0), ("b", 0.0)):
        np.save(tmp_path / f"{name}.npy", ((rng.standard_normal(300_000) + mean) / 50).astype(np.float32))
    sides = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab"]
    on_disk = dpaudit.Observations(with_canary=sides[0], without_canary=sides[1], normalized=True)
    (note,) = scale_notes(on_disk)
    assert "a missing factor of 4" in note or "a missing factor of 5" in note


def test_a_report_and_the_bounds_of_all_methods_have_the_note():
    scores, present = step_scores()
    observations = observed(scores / 256, present)
    result = dpaudit.audit(observations, claim=CLAIM)
    assert Run.of(result, name="run").to_dict()["notes"] == list(result.notes)
    for claim in (CLAIM, None):
        found = examine(observations, delta=1e-5, confidence=0.95, claim=claim, names=["f-DP(CP)"]).to_dict()
        assert found["notes"] == list(result.notes)

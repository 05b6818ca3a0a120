"""What observations are accepted, and how they are counted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dpaudit
from dpaudit.stats._counts import StepScores, count
from dpaudit.stats._observations import CoinSteps

scores = hnp.arrays(
    st.sampled_from([np.float64, np.float32]),
    st.integers(1, 40),
    elements=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 3.0]),
)


@given(present=scores, absent=scores, threshold=st.sampled_from([-3.0, -0.5, 0.25, 3.0]))
def test_counts_are_those_of_a_loop(present, absent, threshold):
    counts = count(dpaudit.Observations(with_canary=present, without_canary=absent), threshold)
    assert counts.false_positives == sum(1 for s in absent if s > threshold)
    assert counts.false_negatives == sum(1 for s in present if not s > threshold)
    assert (counts.num_absent, counts.num_present) == (absent.size, present.size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_file_is_counted_piece_by_piece_as_the_array_is(tmp_path, dtype):
    rng = np.random.default_rng(0)
    arrays = {side: rng.normal(size=600_001).astype(dtype) for side in ("a", "b")}
    for side, array in arrays.items():
        np.save(tmp_path / f"{side}.npy", array)
    mapped = {side: np.load(tmp_path / f"{side}.npy", mmap_mode="r") for side in arrays}
    on_disk = dpaudit.Observations(with_canary=mapped["a"], without_canary=mapped["b"])
    in_memory = dpaudit.Observations(with_canary=arrays["a"], without_canary=arrays["b"])
    assert count(on_disk, 0.3) == count(in_memory, 0.3)
    assert isinstance(on_disk.with_canary, np.memmap)
    assert not isinstance(on_disk.in_memory().with_canary, np.memmap)


def test_a_slice_of_a_mapped_file_is_counted_at_its_own_place(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1000.0))
    part = np.load(tmp_path / "a.npy", mmap_mode="r")[900:]
    observations = dpaudit.Observations(with_canary=part, without_canary=part)
    assert count(observations, 949.5).false_positives == 50


def test_a_bad_score_in_a_file_is_found_when_it_is_counted(tmp_path):
    array = np.zeros(300_000, np.float32)
    array[270_000] = np.nan
    np.save(tmp_path / "a.npy", array)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    observations = dpaudit.Observations(with_canary=mapped, without_canary=[0.0])
    with pytest.raises(dpaudit.InputError, match=r"with_canary\[270000\]=nan"):
        count(observations, 0.5)
    with pytest.raises(dpaudit.InputError, match=r"with_canary\[270000\]=nan"):
        observations.in_memory()


@pytest.mark.parametrize(
    ("present", "absent", "sentence"),
    [
        ([0.0, np.nan], [0.0], r"with_canary\[1\]=nan"),
        ([0.0], [0.0, 1.0, -np.inf], r"without_canary\[2\]=-inf"),
        ([], [0.0], "at least one score, got shape"),
        ([["a"]], [0.0], "with_canary must be numbers, got an array of type <U1"),
        (np.zeros((2, 2, 2)), [0.0], r"steps x canaries, got shape \(2, 2, 2\)"),
        (0.5, [0.0], r"got shape \(\)"),
        (
            np.zeros((2, 3)),
            np.zeros(6),
            "with_canary and without_canary must both be one-dimensional, or both steps",
        ),
        (np.zeros((2, 3)), np.zeros((3, 3)), "the same number of steps"),
    ],
)
def test_what_cannot_be_scores_is_refused_with_a_sentence(present, absent, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.Observations(with_canary=present, without_canary=absent)


def test_rows_of_different_lengths_are_refused_with_a_sentence():
    with pytest.raises(dpaudit.InputError, match="rows of different lengths"):
        dpaudit.Observations(with_canary=[[1.0, 2.0], [3.0]], without_canary=[0.0])


@pytest.mark.parametrize("steps", [[0], [1, 0]])
def test_steps_that_do_not_fit_the_scores_are_refused(steps):
    with pytest.raises(dpaudit.InputError, match="one step per score, in ascending order"):
        dpaudit.Observations(
            with_canary=[1.0, 2.0],
            without_canary=[0.0, 1.0],
            steps=CoinSteps(np.asarray(steps), np.asarray([0, 1])),
        )


def test_steps_of_coins_that_nobody_checked_are_refused():
    """With a constant mask and an offset per canary, guesses would be right without any leak."""
    offset = np.tile([1.0, 0.0], (50, 1))
    with pytest.raises(dpaudit.InputError, match=r"Observations\.from_presence\(\), which checks the coins"):
        dpaudit.Observations(
            with_canary=offset[:, 0], without_canary=offset[:, 1], steps=(np.arange(50), np.arange(50))
        )


def test_checked_coins_survive_a_replacement():
    rng = np.random.default_rng(0)
    fair = dpaudit.Observations.from_presence(rng.normal(size=(50, 8)), rng.random((50, 8)) < 0.5)
    again = replace(fair, normalized=True)
    assert again.by_coin
    assert again.num_steps == 50


def test_huge_finite_scores_whose_sum_overflows_are_accepted():
    huge = np.full(10, 3e38, np.float32)
    observations = dpaudit.Observations(with_canary=huge, without_canary=-huge)
    assert count(observations, 0.0).false_negatives == 0


def test_integers_and_booleans_are_scores_too():
    observations = dpaudit.Observations(with_canary=[1, 2], without_canary=[False, True])
    assert observations.with_canary.dtype == np.float64


@pytest.mark.parametrize(
    ("scores", "present", "sentence"),
    [
        ([1.0, 2.0], [True], r"present must have the shape of the scores, \(2,\), got \(1,\)"),
        ([1.0, 2.0], [0, 2], "only 0 and 1"),
        ([1.0, 2.0], [1, 1], "No score has the canary absent; at least one is needed"),
        ([1.0, 2.0], [0, 0], "No score has the canary present; at least one is needed"),
    ],
)
def test_presence_must_be_a_coin_for_each_score(scores, present, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.Observations.from_presence(scores, present)


def test_coins_keep_the_step_of_every_score():
    scores = np.asarray([[0.9, 0.1, 0.2], [0.8, 0.7, 0.6]])
    present = np.asarray([[True, False, False], [True, True, True]])
    observations = dpaudit.Observations.from_presence(scores, present)
    errors = StepScores.of(observations).errors(np.asarray([0.15, 0.65]))
    assert errors.false_positives.tolist() == [1, 0]
    assert errors.false_negatives.tolist() == [0, 1]
    np.testing.assert_allclose(errors.balanced(), [1 / 3, 1 / 3])


@given(st.integers(1, 30), st.integers(1, 30))
def test_unequal_sides_are_dealt_out_so_that_every_step_has_both(n0, n1):
    observations = dpaudit.Observations(with_canary=np.zeros(n1), without_canary=np.zeros(n0))
    errors = StepScores.of(observations).errors(np.zeros(min(n0, n1)))
    assert errors.num_absent.sum() == n0
    assert errors.num_present.sum() == n1
    assert errors.num_absent.min() >= 1
    assert errors.num_present.min() >= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"false_positives": 5, "num_absent": 4, "false_negatives": 0, "num_present": 1},
        {"false_positives": 0, "num_absent": 0, "false_negatives": 0, "num_present": 1},
        {"false_positives": -1, "num_absent": 4, "false_negatives": 0, "num_present": 1},
        {"false_positives": 0.5, "num_absent": 4, "false_negatives": 0, "num_present": 1},
    ],
)
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(dpaudit.InputError):
        dpaudit.ErrorCounts(**wrong)

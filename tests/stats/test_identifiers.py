"""Scores and presence are joined by the identifiers of their canaries, or refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpaudit

NAMES = [f"canary-{index:02}" for index in range(40)]


def split(observations):
    return {
        side: sorted(zip(ids.tolist(), scores.tolist(), strict=True))
        for side, ids, scores in (
            ("with", observations.with_ids, observations.with_canary),
            ("without", observations.without_ids, observations.without_canary),
        )
    }


@given(
    seed=st.integers(0, 2**32 - 1),
    names=st.one_of(
        st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=30, unique=True),
        st.lists(st.text("abc0 é", min_size=1, max_size=6), min_size=2, max_size=30, unique=True),
    ),
)
def test_permuted_arrays_are_joined_to_the_same_observations(seed, names):
    rng = np.random.default_rng(seed)
    scores, present = rng.standard_normal(len(names)), np.arange(len(names)) % 2 == 0
    first, second = rng.permutation(len(names)), rng.permutation(len(names))
    expected = dpaudit.Observations.from_presence(scores, present, ids=names)
    joined = dpaudit.Observations.from_presence(
        scores[first],
        present[second],
        ids=[names[i] for i in first],
        present_ids=[names[i] for i in second],
    )
    assert split(joined) == split(expected)


@given(seed=st.integers(0, 2**32 - 1))
def test_permuted_columns_of_steps_are_joined(seed):
    rng = np.random.default_rng(seed)
    scores, present = rng.standard_normal((6, 9)), rng.random((6, 9)) < 0.5
    order, names = rng.permutation(9), np.array(NAMES[:9])
    expected = dpaudit.Observations.from_presence(scores, present, ids=names)
    joined = dpaudit.Observations.from_presence(
        scores, present[:, order], ids=names, present_ids=names[order]
    )
    for name in ("with_canary", "without_canary", "with_ids", "without_ids"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(expected, name))
    for name in ("with_canary", "without_canary"):
        np.testing.assert_array_equal(getattr(joined.steps, name), getattr(expected.steps, name))


def test_a_permuted_batch_audits_as_no_leak_and_a_joined_one_as_the_violation_it_is():
    rng = np.random.default_rng(0)
    present = rng.random((200, 40)) < 0.5
    scores, order = present + 0.5 * rng.standard_normal(present.shape), rng.permutation(40)
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    mixed_up = dpaudit.Observations.from_presence(scores, present[:, order], normalized=True)
    joined = dpaudit.Observations.from_presence(
        scores, present[:, order], ids=NAMES, present_ids=np.array(NAMES)[order], normalized=True
    )
    assert dpaudit.audit(mixed_up, claim=claim).verdict is dpaudit.Verdict.NO_VIOLATION
    assert dpaudit.audit(joined, claim=claim).verdict is dpaudit.Verdict.VIOLATION


def test_identifiers_of_pairs_align_both_sides():
    scores = np.arange(12.0).reshape(3, 4)
    present = [[True, False, False, True], [False, True, True, False], [True, False, True, False]]
    with pytest.raises(dpaudit.InputError, match="one canary twice on a side"):
        dpaudit.Observations.from_presence(scores, present, ids=["b", "b", "a", "a"][::2] * 2, paired=True)
    paired = dpaudit.Observations.from_presence(scores, present, ids=["b", "b", "a", "a"], paired=True)
    np.testing.assert_array_equal(paired.with_ids, ["a", "b"])
    np.testing.assert_array_equal(paired.with_canary, [[3, 0], [6, 5], [10, 8]])
    np.testing.assert_array_equal(paired.without_canary, [[2, 1], [7, 4], [11, 9]])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"ids": [1, 2, 3, 4, 5], "present_ids": [5, 4, 3, 2, 9]},
            "Every canary with a score needs a presence flag; there is none for 1",
        ),
        (
            {"ids": [1, 2, 3, 4, 5], "present_ids": [5, 4, 3, 2, 2]},
            "present_ids must have each identifier once, got 2 again",
        ),
        ({"ids": list("aabbc")}, "ids must have each identifier once, got 'a', 'b' again"),
        ({"ids": [1, 2, 3, 4], "present_ids": [1, 2, 3, 4, 5]}, "ids must have 5 identifiers.* got 4"),
        ({"ids": [1, 2, 3, 4, 5], "present_ids": [1, 2, 3]}, "present_ids must have 5 identifiers.* got 3"),
        (
            {"ids": [1, 2, 3, 4, 5], "present_ids": list("12345")},
            "ids and present_ids must have one type, got int64 and <U1",
        ),
        ({"ids": [1, 2, "3", 4, 5]}, "all integers or all strings, got both"),
        ({"ids": [1.5, 2, 3, 4, 5]}, "integers or strings, got shape .* of type float64"),
        ({"ids": [[1, 2, 3, 4, 5]]}, r"shape \(1, 5\)"),
        ({"ids": [True, False, True, True, True]}, "of type bool"),
        ({"present_ids": [1, 2, 3, 4, 5]}, "present_ids= needs ids=, and cannot be used with paired=True"),
    ],
)
def test_identifiers_that_do_not_fit_are_named(options, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.Observations.from_presence(np.arange(5.0), [0, 1, 0, 1, 1], **options)
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.Guesses.from_scores(np.arange(5.0), [0, 1, 0, 1, 1], num_guesses=4, **options)


def test_only_a_few_of_many_missing_identifiers_are_quoted():
    with pytest.raises(
        dpaudit.InputError, match="Every canary with a score needs a presence flag; there is none for"
    ):
        dpaudit.Observations.from_presence(
            np.zeros(40), np.arange(40) % 2, ids=NAMES, present_ids=[f"x{name}" for name in NAMES]
        )
    with pytest.raises(dpaudit.InputError, match="needs a score"):
        dpaudit.Observations.from_presence(
            np.zeros(2), [0, 1, 1], ids=["a", "b"], present_ids=["a", "b", "c"]
        )


def test_sizes_may_differ_only_by_identifiers_that_are_named():
    with pytest.raises(
        dpaudit.InputError, match="Every canary with a score needs a presence flag; there is none for 3"
    ):
        dpaudit.Observations.from_presence([0.0, 1.0, 2.0], [0, 1], ids=[1, 2, 3], present_ids=[2, 1])


def test_guesses_are_joined_too():
    rng = np.random.default_rng(0)
    scores, present, order = rng.standard_normal(40), rng.random(40) < 0.5, rng.permutation(40)
    expected = dpaudit.Guesses.from_scores(scores, present, num_guesses=20)
    joined = dpaudit.Guesses.from_scores(
        scores, present[order], num_guesses=20, ids=NAMES, present_ids=np.array(NAMES)[order]
    )
    assert joined == expected


def test_identifiers_do_not_disturb_a_held_out_part():
    rng = np.random.default_rng(0)
    observations = dpaudit.Observations.from_presence(
        rng.standard_normal(40), rng.random(40) < 0.5, ids=NAMES
    )
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    dpaudit.audit(observations, claim=claim, threshold=dpaudit.HeldOut())


def test_each_side_has_as_many_identifiers_as_scores():
    with pytest.raises(dpaudit.InputError, match="with_ids must have 2 identifiers"):
        dpaudit.Observations(with_canary=[1.0, 2.0], without_canary=[0.0], with_ids=["a"])

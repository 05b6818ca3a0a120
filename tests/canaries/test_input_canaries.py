"""Input canaries are frozen descriptions, whose numbers are checked."""

import numpy as np
import pytest

import dpaudit
from dpaudit.canaries import InputCanary, fingerprints, split_indices, unseen_indices

KINDS = [dpaudit.Blank, dpaudit.Mislabelled, dpaudit.Adversarial, dpaudit.Crafted]


@pytest.mark.parametrize("kind", KINDS)
def test_input_canaries_are_frozen_values(kind):
    assert kind() == kind()
    assert isinstance(kind(), InputCanary)
    with pytest.raises(AttributeError):
        kind().num_steps = 3


@pytest.mark.parametrize("kind", KINDS)
def test_only_those_that_are_optimized_look_at_the_weights(kind):
    assert kind.uses_weights == (kind in (dpaudit.Adversarial, dpaudit.Crafted))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dpaudit.Adversarial(num_steps=0), "num_steps must be at least 1, got 0"),
        (lambda: dpaudit.Adversarial(step_size=-1.0), "step_size must be positive, got -1"),
        (lambda: dpaudit.Adversarial(radius=0.0), "radius must be positive, got 0"),
        (lambda: dpaudit.Crafted(num_steps=2.5), "num_steps must be a whole number, got 2.5"),
        (lambda: dpaudit.Crafted(step_size="big"), "step_size must be a number, got 'big'"),
        (lambda: dpaudit.Crafted(every=0), "every must be at least 1, got 0"),
        (lambda: dpaudit.Crafted(long=1), "long must be True or False, got 1"),
    ],
)
def test_a_canary_that_cannot_be_made_gets_a_sentence(make, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_a_canary_is_made_before_the_first_step_that_it_is_asked_for(kind):
    assert kind().is_due(0, None)
    assert kind().is_due(7, None)
    assert not any(kind().is_due(index, 0) for index in range(20))


def test_a_crafted_canary_is_due_once_in_every_so_manieth_step():
    canary, made_at, due = dpaudit.Crafted(every=3), None, []
    for index in (0, 0, 1, 2, 3, 3, 4, 5, 6):
        if canary.is_due(index, made_at):
            made_at = index
            due.append(index)
    assert due == [0, 3, 6]


def test_examples_are_held_out_at_random_and_none_is_lost():
    kept, held = split_indices(50, 20, seed=3)
    assert len(held) == 20
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(50))
    np.testing.assert_array_equal(held, split_indices(50, 20, seed=3)[1])
    assert held.tolist() != split_indices(50, 20, seed=4)[1].tolist()


def test_held_out_examples_that_the_training_has_too_are_left_out():
    rows = np.arange(12.0).reshape(6, 2)
    seen = set(fingerprints(rows[[1, 4]].T.copy().T))  # in another order in memory
    np.testing.assert_array_equal(unseen_indices(fingerprints(rows), seen), [0, 2, 3, 5])
    with pytest.raises(dpaudit.InputError, match="not be used for training, but all of its 2 examples"):
        unseen_indices(fingerprints(rows[[1, 4]]), seen)

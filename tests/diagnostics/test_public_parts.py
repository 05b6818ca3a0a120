"""Weight decay, which follows from earlier releases, is not accused; parts of sums and of gradients are."""

import numpy as np
import pytest
from statistical_limits import LEVEL

from dpaudit.diagnostics import Diagnostics

SIZE, STEPS, RATE, BATCH = 120, 250, 0.02, 20


def trained(*, decay=0.0, left_over=0.0, added=0.0, momentum=0.0, penalty=np.asarray, seed=0):
    """The diagnosis of noisy descent on a quadratic loss, whose release contains more than sum and noise."""
    rng, record = np.random.default_rng([seed, 4]), Diagnostics()
    weights, moving, last = rng.standard_normal((3, SIZE)) * np.array([[1.0], [0.0], [0.0]])
    target, first = rng.standard_normal(SIZE), weights
    for _ in range(STEPS):
        total = rng.binomial(40, 0.5) / BATCH * (weights - target) + 0.5 * rng.standard_normal(SIZE)
        noise = rng.standard_normal(SIZE) + left_over * last + added * (weights - target)
        noise += decay * (weights - first if penalty is None else penalty(weights))
        record.observe_noise(noise, known=total, released=total + noise, weights=weights)
        moving, last = momentum * moving + total + noise, total
        weights = weights - RATE * (1 - momentum) * moving
    return record.diagnose(1 - LEVEL)


def names(diagnosis):
    return {finding.name for finding in diagnosis.findings}


@pytest.mark.parametrize(("decay", "momentum"), [(0.3, 0.0), (1.0, 0.0), (0.5, 0.9)])
def test_weight_decay_after_the_noise_is_a_note(decay, momentum):
    for seed in range(2):
        diagnosis = trained(decay=decay, momentum=momentum, seed=seed)
        accused = {"noise-by-sum", "step-correlation", "low-rank-noise", "repeated-noise", "balanced-noise"}
        assert not names(diagnosis) & accused
        assert any("weight decay" in note for note in diagnosis.notes)


@pytest.mark.parametrize("penalty", [np.sign, None], ids=["L1", "towards the first weights"])
def test_other_penalties_of_the_weights_are_not_accused(penalty):
    assert names(trained(decay=0.5, penalty=penalty)) <= {"noise-variance", "common-noise", "step-noise"}


@pytest.mark.parametrize(("added", "decay"), [(0.1, 0.0), (0.3, 0.0), (1.0, 0.0), (0.3, 0.3), (1.0, 0.3)])
def test_a_gradient_is_not_taken_for_weight_decay(added, decay):
    assert "noise-by-sum" in names(trained(added=added, decay=decay))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_part_of_the_last_sum_is_found_beside_weight_decay(decay):
    assert "noise-by-sum" in names(trained(decay=decay, left_over=0.3))


def test_correct_training_has_neither_finding_nor_note():
    diagnosis = trained()
    assert (diagnosis.findings, diagnosis.notes) == ((), ())


def followed(noise, *, decay=0.0, size=0.01):
    """The diagnosis of descent by sums that are short, and of this noise."""
    rng, record = np.random.default_rng(0), Diagnostics()
    weights = rng.standard_normal(noise.shape[1])
    for own in noise:
        total, found = size * rng.standard_normal(weights.size), own + decay * weights
        record.observe_noise(found, known=total, released=total + found, weights=weights)
        weights = weights - 1e-3 * (total + found)
    return names(record.diagnose(1 - LEVEL))


def test_the_same_noise_in_every_step_is_not_explained_by_weights():
    noise = np.random.default_rng(0).standard_normal(SIZE)
    assert "repeated-noise" in followed(np.tile(noise, (60, 1)))


@pytest.mark.parametrize("steps", [20, 100, 200])
def test_noise_on_sums_of_steps_is_not_taken_for_weight_decay(steps):
    noise = np.random.default_rng(4).standard_normal((steps, 100))
    noise[1:] -= noise[:-1].copy()
    assert {"step-correlation", "balanced-noise"} & followed(noise)


@pytest.mark.parametrize(("decay", "steps"), [(0.5, 300), (1.0, 1_300)])
def test_strong_decay_of_long_runs_is_not_accused(decay, steps):
    noise = np.random.default_rng(5).standard_normal((steps, 300))
    assert followed(noise, decay=decay, size=0.5) <= {"noise-shape", "noise-tails"}


def drifting(noise, *, decay=0.0, part=0.0):
    """The diagnosis of sums that hardly change; the release has a part of the weights or of the last sum."""
    rng, record = np.random.default_rng(1), Diagnostics()
    base = rng.standard_normal(noise.shape[1])
    weights, last = base, np.zeros_like(base)
    for own in noise:
        total = 0.5 * base + 0.1 * rng.standard_normal(base.size)
        found = own + decay * weights + part * last
        record.observe_noise(found, known=total, released=total + found, weights=weights)
        weights, last = weights - found - total, total
    return record.diagnose(1 - LEVEL)


@pytest.mark.parametrize("part", [0.3, -0.3])
def test_a_part_of_sums_that_hardly_change_is_not_taken_for_weight_decay(part):
    noise = np.random.default_rng(2).standard_normal((150, 400))
    assert "noise-by-sum" in names(drifting(noise, part=part))


def test_decay_of_weights_that_move_in_one_direction_is_not_accused():
    noise = np.random.default_rng(3).standard_normal((300, 400))
    assert names(drifting(noise, decay=0.01)) == set()


def test_noise_that_is_subtracted_in_the_next_step_is_not_taken_for_weight_decay():
    noise = np.random.default_rng(4).standard_normal((150, 400))
    noise[1:] -= noise[:-1].copy()
    assert "step-correlation" in names(drifting(noise))

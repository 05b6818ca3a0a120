"""Noise of an earlier phase is found in a run that continues it, and in no other run."""

import numpy as np
import pytest

from dpaudit.diagnostics import ClaimedStep, ObservedStep, RunHistory
from dpaudit.errors import InputError

CLAIMED = ClaimedStep(noise_multiplier=1.0)
SIZE = 100


def run(history, noise_seed, weights, *, num_steps=20, is_trained=True, scale=1.0, size=SIZE):
    """Pass steps to a history; return the last weights."""
    rng = np.random.default_rng(noise_seed)
    for _ in range(num_steps):
        noise = scale * rng.standard_normal(size)
        history.observe(ObservedStep(noise=noise, weights=weights))
        weights = weights - 0.1 * noise * is_trained
    history.end(weights)
    return weights


def phases(*seeds, start=0, **options):
    """The history of the last of several phases."""
    weights = np.random.default_rng([start, 1]).standard_normal(options.get("size", SIZE))
    for seed in seeds:
        history = RunHistory()
        weights = run(history, seed, weights, **options)
    return history


def names(history):
    return [finding.name for finding in history.results(CLAIMED).certain]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("between", [(), (7,)], ids=["the phase before", "an older phase"])
def test_a_phase_with_the_noise_of_an_earlier_one_is_found(seed, between):
    history = phases(100 + seed, *between, 100 + seed, start=seed)
    assert names(history) == ["earlier-noise"]
    assert "20 of 20 steps, the first of them step 0" in history.results(CLAIMED).certain[0].sentence
    assert names(phases(100 + seed, *between, 200 + seed, start=seed)) == []


def test_noise_of_another_scale_or_precision_is_the_same_noise():
    weights, histories = np.ones(SIZE), [RunHistory(), RunHistory()]
    weights = run(histories[0], 0, weights, scale=2.0)
    rng = np.random.default_rng(0)
    for _ in range(3):
        noise = rng.standard_normal(SIZE).astype(np.float16)
        histories[1].observe(ObservedStep(noise=noise, weights=weights))
    assert names(histories[1]) == ["earlier-noise"]


@pytest.mark.parametrize("starts", [(0, 0), (0, 1)], ids=["the same weights", "other weights"])
def test_the_same_seed_in_another_training_is_no_finding(starts):
    histories = [phases(3, 4, start=start + 50) for start in starts]
    assert [names(history) for history in histories] == [[], []]


def test_the_same_seed_in_two_runs_from_one_checkpoint_is_no_finding():
    weights = run(RunHistory(), 5, np.full(SIZE, 2.0))
    forks = [RunHistory(), RunHistory()]
    for history in forks:
        run(history, 6, weights)
    assert [names(history) for history in forks] == [[], []]


@pytest.mark.parametrize("options", [{"is_trained": False}, {"num_steps": 0}, {"size": 8}])
def test_runs_that_train_nothing_or_have_few_parameters_are_not_compared(options):
    assert names(phases(9, 9, start=77, **options)) == []


@pytest.mark.parametrize(("seed", "expected"), [(1, ["earlier-noise"]), (2, [])])
def test_a_resumed_run_knows_the_noise_of_its_state(seed, expected):
    first, resumed = RunHistory(), RunHistory()
    run(first, 1, np.full(SIZE, 3.0))
    resumed.load_state_dict(first.state_dict())
    run(resumed, seed, np.full(SIZE, 4.0))
    assert names(resumed) == expected
    again = RunHistory()
    again.load_state_dict(resumed.state_dict())
    assert names(again) == expected
    with pytest.raises(InputError, match="the noise of earlier phases"):
        again.load_state_dict({"noise": []})


def test_what_an_observer_leaves_is_handed_on():
    weights, left = np.full(SIZE, 5.0), []
    for number in range(3):
        history = RunHistory()
        history.observe(ObservedStep(noise=np.ones(SIZE), weights=weights))
        left.append(history.earlier)
        weights = weights + 1
        history.end(weights, number)
    assert left == [(), (0,), (0, 1)]


def test_few_phases_are_remembered():
    weights = np.full(SIZE, 6.0)
    for seed in range(100):
        weights = run(RunHistory(), seed, weights)
    assert len(RunHistory._phases) <= 64
    assert max(len(phase.noise) for phase in RunHistory._phases.values()) <= 1024

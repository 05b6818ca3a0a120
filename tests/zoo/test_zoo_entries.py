"""Every fault is caught by what should catch it, and its correct twin is not flagged."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from statistical_limits import LEVEL, most_flagged, spread_range

from dpaudit.training import faults
from dpaudit.zoo import ENTRIES, SECOND_HALL, chosen, judge
from dpaudit.zoo._entry import noise_of
from dpaudit.zoo._native import LEAVES, NativeTraining
from dpaudit.zoo._steps import NOISE, PlainStep, clipped_by_parameter_and_noised_twice, correct_step

# what has to be among the things that flag the fault
CAUGHT_BY = {
    "clip-after-mean": {"bound"},
    "noise-100-seeds": {"repeated-noise"},
    "noise-too-small": {"bound", "noise-variance"},
    "seed-per-leaf": {"leaf-correlation"},
    "seed-constant": {"repeated-noise"},
    "closure-clean": {"bound", "noise-variance"},
    "silent-sgd": {"bound", "noise-variance"},
    "raw-gradient-mixed": {"bound"},
    "sum-mean": {"bound", "noise-variance"},
    "accumulate-noise": {"bound", "noise-variance"},
    "unnoised-coordinates": {"coordinate-noise"},
    "empty-batch": {"step-noise"},
    "not-poisson": {"bound", "participation-counts"},
    "per-layer-clip": {"bound"},
    "double-clip-per-parameter": {"bound"},
    "microbatch": {"replay"},
    "floor-batch": {"replay"},
    "batch-norm": {"replay"},
    "sigma-search": {"replay"},
    "ghost-default-clip": {"bound"},
    "ghost-bias-norm": {"replay"},
    "ghost-accumulate": {"replay"},
    "tied-weights": {"replay"},
    "ddp-batch": {"noise-variance"},
    "ddp-rank-noise": {"bound", "repeated-noise"},
    # the second hall
    "noise-half-precision": {"tied-noise"},
    "noise-grid": {"tied-noise"},
    "noise-table": {"tied-noise"},
    "noise-box-muller": {"tied-pairs"},
    "noise-seed-in-code": {"noise-seed"},
    "noise-truncated": {"missing-tail", "noise-tails"},
    "noise-twelve-uniforms": {"missing-tail"},
    "noise-uniform": {"noise-variance", "coordinate-correlation"},
    "noise-laplace": {"noise-tails", "noise-shape"},
    "noise-forked": {"shifted-noise"},
    "seed-plus-index": {"shifted-noise", "tied-noise"},
    "noise-low-rank": {"low-rank-noise"},
    "noise-by-largest-norm": {"noise-by-canaries"},
    "noise-by-batch-size": {"noise-by-batch"},
    "clip-by-value": {"bound", "clipping"},
    "clip-without-biases": {"clipping"},
    "clip-overflow": {"bound", "clipping"},
    "clip-each-leaf": {"clipping"},
    "sum-not-cleared": {"noise-by-sum"},
    "shortcut-after-noise": {"clipping"},
    "ghost-plain-loss": {"rows-drawn"},
    "ghost-adaptive": {"sum-norm"},
    "rows-per-example": {"rows-drawn"},
    "weighted-sampler": {"duplicate-examples"},
    "same-order": {"repeated-batches"},
    "two-batches-per-step": {"sample-rate"},
    "poisson-off": {"batch-sampler"},
    "oversampled-class": {"repeated-entries"},
    "non-finite-gradient": {"non-finite-example"},
    "skip-if-non-finite": {"non-finite-example"},
    "divisor-from-size": {"data-set-size"},
    "divided-by-batch": {"divisor"},
    "small-batch-skipped": {"release-count"},
    "class-weights": {"coupled-examples"},
    "contrastive-loss": {"coupled-examples"},
    "running-statistics": {"buffers"},
    "rate-from-loss": {"hyperparameters"},
    "raw-moments": {"optimizer-state"},
    "second-optimizer": {"other-state"},
}
SEED = 0
MOST_STEPS = 500
BY_NAME = {entry.name: entry for entry in ENTRIES}
# Faults that take long, or whose family has others: `make test-long` runs them.
LONG = {
    "ddp-batch",
    "ddp-rank-noise",
    "noise-grid",
    "noise-table",
    "noise-twelve-uniforms",
    "noise-uniform",
    "noise-laplace",
    "noise-by-batch-size",
    "clip-each-leaf",
    "shortcut-after-noise",
    "ghost-adaptive",  # a test of the observer has the same fault
    "same-order",
    "contrastive-loss",
    "rate-from-loss",
    "small-batch-skipped",
}
# Twins that are the same training as another one's differ only in their seed; those on two processes take
# long, and are run by `make zoo`.
TWINS = [
    "clip-after-mean",
    "noise-too-small",
    "seed-constant",
    "empty-batch",
    "not-poisson",
    "per-layer-clip",
    "double-clip-per-parameter",
    "microbatch",
    "floor-batch",
    "batch-norm",
    "sigma-search",
    "ghost-default-clip",
    "ghost-bias-norm",
    "ghost-accumulate",
    "tied-weights",
    "noise-half-precision",
    "noise-seed-in-code",
    "ghost-plain-loss",
    pytest.param("ghost-adaptive", marks=pytest.mark.long),
    "weighted-sampler",
    "divisor-from-size",
    "running-statistics",
    "class-weights",
    "non-finite-gradient",
    "skip-if-non-finite",
]


def test_every_fault_is_expected_by_some_name():
    assert list(CAUGHT_BY) == list(BY_NAME)


@pytest.mark.few(26)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CAUGHT_BY]
)
def test_a_fault_is_caught_within_500_steps(name):
    evidence = BY_NAME[name].observe(is_broken=True, seed=SEED)
    assert evidence.num_steps <= MOST_STEPS
    assert set(judge(evidence).caught_by) >= CAUGHT_BY[name]


@pytest.mark.few(10)
@pytest.mark.parametrize("name", TWINS)
def test_a_correct_twin_is_not_flagged(name):
    evidence = BY_NAME[name].observe(is_broken=False, seed=SEED)
    assert judge(evidence, confidence=1 - LEVEL).caught_by == ()


@pytest.mark.long
def test_correct_twins_of_steps_are_not_flagged_in_95_percent_of_seeds():
    twin = PlainStep(broken=correct_step, leaves=(64,) * 4, num_steps=100)
    assert sum(bool(judge(twin(False, seed)).caught_by) for seed in range(40)) <= most_flagged(40)


@pytest.mark.long
@pytest.mark.parametrize("name", ["noise-half-precision", "weighted-sampler", "ghost-plain-loss"])
def test_correct_twins_of_the_second_hall_are_not_flagged_in_95_percent_of_seeds(name):
    twins = [BY_NAME[name].observe(is_broken=False, seed=seed) for seed in range(1, 41)]
    assert sum(bool(judge(twin).caught_by) for twin in twins) <= most_flagged(40)


@pytest.mark.long
@pytest.mark.parametrize("name", [one.name for one in SECOND_HALL if one.kind.startswith("Opacus, ")])
def test_correct_settings_and_replayed_steps_are_never_flagged(name):
    for seed in range(1, 11):
        assert judge(BY_NAME[name].observe(is_broken=False, seed=seed)).caught_by == ()


def test_noise_that_is_added_twice_has_twice_the_variance():
    rng, leaves = np.random.default_rng(0), (64,) * 64
    noise = clipped_by_parameter_and_noised_twice(np.zeros((1, sum(leaves))), leaves, rng)
    low, high = spread_range(noise.size)
    assert low < noise.std(ddof=1) / (NOISE * np.sqrt(2)) < high


@pytest.mark.long
def test_clipping_after_the_mean_is_shown_as_totally_broken():
    # By bets: the clipped mean scales all canaries of a step together, so they are not to be counted alone.
    (entry,) = chosen(ENTRIES, ["clip-after-mean"])
    evidence = replace(entry.specimen, num_steps=2000)(True, SEED)
    assert judge(replace(evidence, diagnostics={})).result.bound.epsilon > 35


def test_scores_of_a_step_depend_on_each_other_where_the_mean_is_clipped():
    (entry,) = chosen(ENTRIES, ["clip-after-mean"])
    for is_broken in (True, False):
        scores = replace(entry.specimen, num_steps=100)(is_broken, SEED).scores
        present = np.where(scores.present, scores.values, np.nan)
        counts = scores.present.sum(axis=1)
        spread = np.nanmean(present, axis=1).std()
        independent = np.sqrt(np.nanvar(present, axis=1).mean() / counts.mean())
        assert bool(spread > 2 * independent) is is_broken


def test_the_papers_limit_of_too_little_noise_is_caught_by_bets_too():
    ratio = noise_of(1.57) / noise_of(1.27)
    specimen = NativeTraining(mechanism=partial(faults.NoiseTooSmall, factor=ratio))
    assert "bound" in judge(specimen(True, SEED)).caught_by


def test_leaves_are_those_of_the_model():
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        NativeTraining(mechanism=partial(faults.SameSeedForLeaves, leaves=LEAVES[:-1]), num_steps=1)(True, 0)

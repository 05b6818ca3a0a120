"""Every fault is caught by what should catch it, and its correct twin is not flagged."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from short_blocks import require_short
from statistical_limits import LEVEL, most_flagged

from dpaudit.training import broken
from dpaudit.zoo import ENTRIES, ENTRIES_FOUND_BY_TESTS, judge
from dpaudit.zoo._evidence import noise_of
from dpaudit.zoo._native import LEAVES, NativeTraining

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
    "norm-within-batch",
    "update-masked",
    "phases-reseeded",
]


def test_every_fault_is_expected_to_be_caught_by_something():
    assert [entry.name for entry in ENTRIES if not entry.expected] == []


@pytest.mark.few(26)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in BY_NAME]
)
def test_a_fault_is_caught_within_500_steps(name):
    evidence = BY_NAME[name].observe(is_broken=True, seed=SEED)
    assert evidence.num_steps <= MOST_STEPS
    judged = judge(evidence)
    assert set(judged.caught_by) >= set(BY_NAME[name].expected)
    if judged.result is not None:
        require_short(str(judged.result))
        assert "\n" not in repr(judged.result)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", TWINS)
def test_a_correct_twin_is_not_flagged(name):
    evidence = BY_NAME[name].observe(is_broken=False, seed=SEED)
    assert judge(evidence, confidence=1 - LEVEL).caught_by == ()


@pytest.mark.long
def test_correct_twins_of_steps_are_not_flagged_in_95_percent_of_seeds():
    twin = replace(BY_NAME["per-layer-clip"].scenario, num_steps=100)
    assert sum(bool(judge(twin(False, seed)).caught_by) for seed in range(40)) <= most_flagged(40)


@pytest.mark.long
@pytest.mark.parametrize("name", ["noise-half-precision", "weighted-sampler", "ghost-plain-loss"])
def test_correct_twins_with_default_settings_are_not_flagged_in_95_percent_of_seeds(name):
    twins = [BY_NAME[name].observe(is_broken=False, seed=seed) for seed in range(1, 41)]
    assert sum(bool(judge(twin).caught_by) for twin in twins) <= most_flagged(40)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [entry.name for entry in ENTRIES_FOUND_BY_TESTS if entry.kind.startswith("Opacus, ")]
)
def test_correct_settings_and_replayed_steps_are_never_flagged(name):
    for seed in range(1, 11):
        assert judge(BY_NAME[name].observe(is_broken=False, seed=seed)).caught_by == ()


@pytest.mark.long
def test_clipping_after_the_mean_is_shown_as_totally_broken():
    # By bets: the clipped mean scales all canaries of a step together, so they are not to be counted alone.
    evidence = replace(BY_NAME["clip-after-mean"].scenario, num_steps=2000)(True, SEED)
    assert judge(replace(evidence, diagnostics={})).result.bound.epsilon > 35


def test_scores_of_a_step_depend_on_each_other_where_the_mean_is_clipped():
    for is_broken in (True, False):
        scores = replace(BY_NAME["clip-after-mean"].scenario, num_steps=100)(is_broken, SEED).scores
        present = np.where(scores.present, scores.values, np.nan)
        counts = scores.present.sum(axis=1)
        spread = np.nanmean(present, axis=1).std()
        independent = np.sqrt(np.nanvar(present, axis=1).mean() / counts.mean())
        assert bool(spread > 2 * independent) is is_broken


def test_the_papers_limit_of_too_little_noise_is_caught_by_bets_too():
    ratio = noise_of(1.57) / noise_of(1.27)
    scenario = NativeTraining(mechanism=partial(broken.NoiseTooSmall, factor=ratio))
    assert "bound" in judge(scenario(True, SEED)).caught_by


def test_leaves_are_those_of_the_model():
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        NativeTraining(mechanism=partial(broken.SameSeedForLeaves, leaves=LEAVES[:-1]), num_steps=1)(True, 0)

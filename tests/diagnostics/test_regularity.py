"""Noise that is too regular is found; correct noise of any scales is accused as seldom as p-values say."""

import numpy as np
import pytest
from scipy import special, stats
from statistical_limits import most_flagged
from test_noise_faults import LEAVES, SIZE, diagnosed, normal

from dpaudit.diagnostics import Diagnostics, NoiseCheck, ObservedStep, likely_causes
from dpaudit.diagnostics._data_tests import missing_direction
from dpaudit.diagnostics._distribution_tests import _alike, balanced_noise, constant_norm
from dpaudit.diagnostics._p_values import RESOLUTION


def unit(vector):
    return vector / np.linalg.norm(vector)


def without(direction, noise):
    return noise - (noise @ direction) * direction


def sphere(rng, _):
    return np.sqrt(SIZE) * unit(normal(rng))


def centered(rng, _):
    noise = normal(rng)
    return noise - noise.mean()


def stratified(rng, _):
    return special.ndtri((rng.permutation(SIZE) + rng.random(SIZE)) / SIZE)


def orthogonal(rng, context):
    return without(unit(context["total"]), normal(rng))


def beside_last_release(rng, context):
    noise, past = normal(rng), context["past"]
    return without(unit(past[-1] + context["sums"][-1]), noise) if past else noise


def beside_last_sum(rng, context):
    noise, sums = normal(rng), context["sums"]
    return 0.9 * without(unit(sums[-1]), noise) + 0.1 * noise if sums else noise


def one_leaf(change):
    def noise(rng, _):
        drawn = normal(rng)
        drawn[: LEAVES[0]] = change(drawn[: LEAVES[0]])
        return drawn

    return noise


FAULTS = {
    "sphere": (sphere, "constant-norm", "normalized"),
    "centered": (centered, "balanced-noise", "centered"),
    "stratified": (stratified, "balanced-noise", "stratified"),
    "orthogonal": (orthogonal, "missing-direction", "projected"),
    "beside the last release": (beside_last_release, "missing-direction", "projected"),
    "beside the last sum": (beside_last_sum, "missing-direction", "projected"),
    "leaf centered": (one_leaf(lambda leaf: leaf - leaf.mean()), "balanced-noise", "centered"),
    "leaf of fixed norm": (
        one_leaf(lambda leaf: np.sqrt(leaf.size) * unit(leaf)),
        "constant-norm",
        "normalized",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_noise_that_is_too_regular_is_found_and_its_cause_comes_first(fault):
    noise, name, word = FAULTS[fault]
    diagnosis = diagnosed(noise, level=1e-6)
    assert name in [finding.name for finding in diagnosis.findings]
    assert word in diagnosis.likely_causes()[0]


def test_noise_that_adds_up_to_nothing_over_the_steps_is_found():
    rng, record = np.random.default_rng(0), Diagnostics()
    noise = rng.standard_normal((100, 50))
    for row in noise - noise.mean(axis=0):
        record.observe_noise(row)
    finding = record.diagnose(1 - 1e-6).findings[0]
    assert (finding.name, "earlier steps" in finding.cause) == ("balanced-noise", True)
    assert "squared sums over all steps are" in finding.sentence


SCALES = {
    "equal": lambda _: np.ones((12, 10)),
    "by coordinate": lambda _: np.repeat([1.0, 8.0], 5) * np.ones((12, 10)),
    "by step": lambda _: np.repeat([1.0, 1.5, 3.0], 4)[:, None] * np.ones((12, 10)),
    "random": lambda rng: 1 + rng.random((12, 10)),
}
TESTS = (balanced_noise, constant_norm, missing_direction)


@pytest.mark.parametrize("scales", SCALES)
def test_p_values_of_correct_noise_are_small_as_seldom_as_they_say_at_any_scales(scales):
    small, runs = dict.fromkeys(TESTS, 0), 120
    for seed in range(runs):
        rng, check = np.random.default_rng([seed, 3]), NoiseCheck()
        for row in SCALES[scales](rng) * rng.standard_normal((12, 10)):
            check.observe(ObservedStep(noise=row, leaves=(6, 4), total=rng.standard_normal(10)))
        for test in TESTS:
            small[test] += test(check.record()).p_value <= 0.05
    assert max(small.values()) <= most_flagged(runs, comparisons=12)
    if scales == "equal":  # the tests do use their error rate
        assert min(small.values()) > 0


def test_a_pair_of_energies_is_as_alike_as_the_f_distribution_says():
    energies, width = np.array([7.0, 9.0, 4.0, 20.0]), 9
    for (one, other), found in zip(
        energies.reshape(-1, 2), _alike(energies, width, resolution=0.0), strict=True
    ):
        assert found == pytest.approx(np.diff(stats.f.cdf([one / other, other / one], width, width))[0])
    assert (_alike(energies, width, RESOLUTION) > _alike(energies, width, 0.0)).all()
    assert _alike(np.array([0.0, 0.0, 5.0, 5.0]), width, RESOLUTION)[0] == 1.0


def test_rounding_is_not_taken_for_regular_noise():
    record = Diagnostics()
    for _ in range(100):
        record.observe_noise(np.full(40, 1e-5))
    names = [finding.name for finding in record.diagnose().findings]
    assert "noise-variance" in names
    assert not {"constant-norm", "balanced-noise"} & set(names)


def test_missing_noise_is_reported_once():
    diagnosis = diagnosed(lambda rng, _: 0.5 * normal(rng))
    assert [finding.name for finding in diagnosis.findings] == ["noise-variance"]


def test_tails_and_low_rank_are_consequences():
    assert "without noise" in likely_causes(findings=["missing-tail", "step-noise"])[0]
    assert len(likely_causes(findings=["missing-tail", "step-noise"])) == 1
    assert "truncated" in likely_causes(findings=["missing-tail", "constant-norm"])[0]


def subtracted_24_steps_later():
    drawn = []

    def noise(rng, _):
        drawn.append(normal(rng))
        return drawn[-1] - (0.5 * drawn[-25] if len(drawn) > 24 else 0)

    return noise


def test_reused_noise_is_not_called_a_smaller_space():
    diagnosis = diagnosed(subtracted_24_steps_later())
    assert diagnosis.findings[0].name == "low-rank-noise"
    assert "steps 24 apart is correlated" in diagnosis.likely_causes()[0]


@pytest.mark.parametrize(("size", "word"), [(1, "fixed size"), (3, "in groups")])
def test_batch_sizes_that_vary_too_much_have_another_cause(size, word):
    rng, record = np.random.default_rng(0), Diagnostics(sample_rate=0.1)
    for _ in range(200):
        drawn = np.flatnonzero(rng.random(100) < 0.1) if size > 1 else rng.choice(100, 30, replace=False)
        together = (drawn[:, None] * size + np.arange(size)).ravel() if size > 1 else drawn
        record.observe_batch(together, 300)
    diagnosis = record.diagnose()
    sizes = [finding for finding in diagnosis.findings if finding.name == "batch-sizes"]
    assert sizes
    assert any(word in cause for cause in diagnosis.likely_causes())

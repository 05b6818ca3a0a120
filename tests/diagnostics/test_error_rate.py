"""A correct training has a finding as seldom as the confidence says; a longer run is in benchmarks."""

from collections import Counter

import numpy as np
import pytest
from statistical_limits import most_flagged

from dpaudit.diagnostics import Diagnostics, NoiseCheck, ObservedStep
from dpaudit.diagnostics._data_tests import noise_by_batch


def correct(seed, num_steps, leaves, examples, grid):
    """The diagnosis of a training that is what it says; its noise is rounded to a grid, if there is one."""
    rng = np.random.default_rng(seed)
    num_examples, sample_rate = examples
    record = Diagnostics(sample_rate=sample_rate)
    for _ in range(num_steps):
        noise, known = rng.standard_normal((2, sum(leaves))).astype(np.float32)
        rounded = np.round(noise / grid) * grid if grid else noise
        more = {"known": 0.3 * known, "batch_size": rng.poisson(20)}
        record.observe_noise(rounded, leaves, rounding=grid / 2, **more)
        record.observe_batch(np.flatnonzero(rng.random(num_examples) < sample_rate), num_examples)
    return record.diagnose()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("size", "repetitions"),
    [
        ((1, (1,), (4, 0.5), 0), 200),
        ((3, (2, 2), (6, 0.3), 0), 200),
        ((30, (20, 5, 5), (60, 0.1), 0), 120),
        ((30, (20, 5, 5), (60, 0.1), 0.002), 60),
    ],
    ids=["1 step", "3 steps", "30 steps", "30 steps on a grid"],
)
def test_false_alarms_are_as_rare_as_the_confidence_says(size, repetitions):
    made = [correct(seed, *size) for seed in range(repetitions)]
    most = most_flagged(repetitions, broken=0.25)
    assert sum(bool(diagnosis.findings) for diagnosis in made) <= most
    small = Counter(check.name for diagnosis in made for check in diagnosis.checks if check.p_value <= 0.05)
    names = {check.name for diagnosis in made for check in diagnosis.checks}
    most_of_a_test = most_flagged(repetitions, comparisons=len(names))
    assert all(count <= most_of_a_test for count in small.values()), small
    if size[0] > 1:  # without the correction for many tests the rate would be seen to be wrong
        assert sum(min(check.p_value for check in one.checks) <= 0.05 for one in made) > most


def regression(seed, num_steps=2000):
    """The noise of a linear regression; little is clipped, so the sums of a step depend on earlier noise."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((1000, 8))
    targets = inputs @ rng.standard_normal(8) + rng.standard_normal(1000)
    norm = 2 * np.linalg.norm(inputs * targets[:, None], axis=1).max()
    weights, check = np.zeros(8), NoiseCheck()
    for _ in range(num_steps):
        chosen = rng.random(1000) < 0.1
        rows = inputs[chosen] * (inputs[chosen] @ weights - targets[chosen])[:, None]
        lengths, noise = np.linalg.norm(rows, axis=1), rng.standard_normal(8)
        total = (rows / np.maximum(1.0, lengths / norm)[:, None]).sum(axis=0)
        norms = {"sum_norm": np.linalg.norm(total), "max_row_norm": lengths.max()}
        check.observe(ObservedStep(noise=noise, **norms))
        weights = weights - (total + norm * noise) / 100  # the inverse of the curvature
    return check.record()


def test_sums_that_follow_earlier_noise_are_no_finding_about_the_noise():
    flagged = sum(noise_by_batch(regression(seed)).p_value <= 0.01 for seed in range(3))
    assert flagged <= most_flagged(3, 0.01, broken=0.99)


def test_a_schedule_from_a_thousand_times_the_claim_down_to_it_is_no_finding():
    rng, record = np.random.default_rng(0), Diagnostics()
    for level in np.maximum(1.0, 1000 * 0.9 ** np.arange(600)):
        record.observe_noise(level * rng.standard_normal(40), sum_norm=level, batch_size=rng.poisson(50))
    assert record.diagnose().findings == ()

"""A correct training has a finding as seldom as the confidence says; a longer run is in benchmarks."""

from collections import Counter

import numpy as np
import pytest
from statistical_limits import most_flagged

from dpaudit.diagnostics import Diagnostics


def correct(seed, num_steps, leaves, examples, grid):
    """The diagnosis of a training that is what it says; its noise is rounded to a grid, if there is one."""
    rng = np.random.default_rng(seed)
    num_examples, sample_rate = examples
    record = Diagnostics(sample_rate=sample_rate)
    for _ in range(num_steps):
        noise = rng.standard_normal(sum(leaves)).astype(np.float32)
        record.observe_noise(np.round(noise / grid) * grid if grid else noise, leaves, rounding=grid / 2)
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

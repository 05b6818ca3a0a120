"""Tests of the noise: what they compute, and what they do at the edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statistical_limits import LEVEL, most_flagged

from dpaudit import InputError
from dpaudit.diagnostics import Diagnostics, NoiseMaximum, ObservedStep
from dpaudit.diagnostics._noise_check import NoiseLog
from dpaudit.diagnostics._noise_record import Layout

LEAVES_OF_30 = {"weight": 20, "bias": 10}


def record_of(noise, leaves=None):
    record = Diagnostics()
    for row in noise:
        record.observe_noise(row, leaves)
    return record


def checks(noise, leaves=None):
    return {check.name: check for check in record_of(noise, leaves).diagnose().checks}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_coordinates_kept_for_every_step_are_spread_over_all_leaves():
    layout = Layout.of(10_000, (4_000, 1_000, 5_000))
    assert np.array_equal(layout.sketch, np.unique(layout.sketch))
    for start in (0, 4_000, 5_000):  # neighbors, which may share noise at an offset
        assert set(range(start, start + 170)) <= set(layout.sketch.tolist())
    others = np.setdiff1d(layout.sketch, np.add.outer([0, 4_000, 5_000], np.arange(170)))
    shares = np.histogram(others, (0, 4_000, 5_000, 10_000))[0] / 512
    assert shares == pytest.approx([0.4, 0.1, 0.5], abs=0.1)
    assert Layout.of(100, None).sketch.tolist() == list(range(100))


def flattened(state):
    """Every number of a nested state, for comparison."""
    if isinstance(state, dict):
        return {
            f"{key}.{name}": value for key, part in state.items() for name, value in flattened(part).items()
        }
    return {"": np.asarray(state).tolist()}


@pytest.mark.parametrize("kind", ["single", "bfloat16", "grid"])
def test_steps_that_are_added_together_give_the_same_state_as_one_by_one(kind):
    noise, total = normal(50, 30), 3 * normal(50, 30, seed=1)
    released = (noise + total).astype(np.float32)
    if kind == "bfloat16":  # until a number of the last steps is not
        released[:45] = (released[:45].view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif kind == "grid":
        released[:45] = np.round(released[:45] * 64) / 64
    steps = [
        ObservedStep(
            noise=noise[index],
            leaves=LEAVES_OF_30,
            total=total[index],
            released=released[index],
            max_noise=NoiseMaximum(np.abs(noise[index]).max(), 30),
            num_rows=index % 7,
        )
        for index in range(50)
    ]
    one_by_one, together = NoiseLog(), NoiseLog()
    for step in steps:
        one_by_one.observe([step])
    for some in (slice(0, 1), slice(1, 20), slice(20, 50)):
        together.observe(steps[some])
    first, second = (flattened(log.state_dict()) for log in (one_by_one, together))
    assert first.keys() == second.keys()
    for name, numbers in first.items():
        np.testing.assert_equal(numbers, second[name], err_msg=name)


@pytest.mark.parametrize("lag", [700, 1_300])
def test_noise_that_repeats_anywhere_in_a_long_run_is_found(lag):
    noise = normal(2_500, 70)
    noise[lag + 600 : lag + 620] = noise[600:620]
    found = record_of(noise).diagnose().findings
    assert "repeated-noise" in [finding.name for finding in found]


def test_the_ratio_of_the_noise_and_its_interval_are_those_of_a_chi_square():
    noise = 0.9 * normal(30, 12)
    found = record_of(noise).diagnose(0.9).noise
    energy = (noise**2).sum()
    assert found.ratio == pytest.approx(np.sqrt((noise**2).mean()))
    assert found.low == pytest.approx(np.sqrt(energy / stats.chi2.ppf(0.95, 360)))
    assert found.high == pytest.approx(np.sqrt(energy / stats.chi2.ppf(0.05, 360)))


def of_signs(first, second):
    """The correlation of normal numbers whose signs agree as often."""
    return np.sin(np.pi / 2 * np.sign(first * second).mean())


def test_the_correlation_of_steps_is_that_of_all_pairs_so_many_apart():
    noise = normal(9, 40)
    noise[3:6] += noise[0:3]  # three apart
    check = checks(noise)["step-correlation"]
    assert check.estimate == pytest.approx(of_signs(noise[:-3], noise[3:]))
    assert "3 apart" in check.sentence


def test_the_correlation_of_leaves_is_that_of_their_first_coordinates():
    noise = normal(6, 10)
    noise[:, 7:10] = noise[:, 0:3] + 0.5 * noise[:, 7:10]
    check = checks(noise, {"long": 4, "middle": 3, "short": 3})["leaf-correlation"]
    assert check.estimate == pytest.approx(of_signs(noise[:, 0:3], noise[:, 7:10]))
    assert "long and short" in check.sentence


def test_repeated_noise_is_the_pair_whose_signs_agree_or_differ_most():
    noise = normal(40, 12)
    agreement = np.sign(noise) @ np.sign(noise).T / 12
    np.fill_diagonal(agreement, 0)
    found = checks(noise)["repeated-noise"]
    assert abs(found.estimate) == pytest.approx(np.sin(np.pi / 2 * np.abs(agreement).max()))
    pairs, most = 40 * 39 / 2, 12 * (1 + np.abs(agreement).max()) / 2
    assert found.p_value == min(1.0, pairs * 2 * stats.binom.sf(most - 1, 12, 0.5))


def test_the_least_noisy_parts_are_named():
    noise = normal(50, 12)
    noise[7] *= 0.01
    noise[:, 9:] *= 0.2
    noise[:, 3] = 0.0
    found = checks(noise, {"wide": 9, "quiet": 3})
    assert "step 7 " in found["step-noise"].sentence
    assert "leaf quiet " in found["leaf-noise"].sentence
    assert "coordinate 3 is 0 % of the claimed level" in found["coordinate-noise"].sentence


@pytest.mark.parametrize("scale", [1.2, 30.0])
def test_too_much_noise_is_a_note_and_no_finding(scale):
    diagnosis = record_of(scale * normal(300, 60), [20, 40]).diagnose(1 - LEVEL)
    assert diagnosis.findings == ()
    assert len(diagnosis.notes) == 1
    assert "noise above the claim" in diagnosis.notes[0]


SIDES = np.arange(300)
MORE = {
    "half of it twice": np.where(SIDES < 150, 1.0, 2.0),
    "a tenth of it ten times": np.where(SIDES < 270, 1.0, 10.0),
    "each layer twice the last": 2.0 ** (SIDES // 75),
    "every second coordinate four times": np.where(SIDES % 2, 1.0, 4.0),
}


@pytest.mark.parametrize("scales", MORE.values(), ids=MORE)
def test_noise_of_unequal_size_that_is_nowhere_below_the_claim_is_no_finding(scales):
    found = [record_of(scales * normal(100, 300, seed=seed), [150, 150]).diagnose() for seed in range(8)]
    assert sum(bool(diagnosis.findings) for diagnosis in found) <= most_flagged(8, broken=0.9)


@pytest.mark.parametrize("fault", ["repeats", "leaves", "lags", "mean"])
def test_noise_of_unequal_size_that_depends_on_other_noise_is_found(fault):
    noise = normal(100, 300)
    if fault == "repeats":
        noise[70] = noise[3]
    if fault == "leaves":
        noise[:, 150:] = noise[:, :150]
    if fault == "lags":
        noise[1:] += 0.3 * noise[:-1]
    if fault == "mean":
        noise += 0.5
    expected = {"repeats": "repeated-noise", "leaves": "leaf-correlation", "lags": "step-correlation"}
    findings = record_of(MORE["each layer twice the last"] * noise, [150, 150]).diagnose().findings
    assert expected.get(fault, "coordinate-correlation") in {finding.name for finding in findings}


@pytest.mark.parametrize("period", [1, 7, 100])
def test_the_period_of_noise_is_said(period):
    noise = np.tile(normal(period, 30), (-(-300 // period), 1))[:300]
    sentence = checks(noise)["repeated-noise"].sentence
    assert (f"every {period} steps" if period > 1 else "same noise") in sentence


def test_the_number_of_different_vectors_is_said():
    rng = np.random.default_rng(3)
    noise = normal(10, 30)[rng.integers(10, size=200)]
    assert "200 steps use only 10 distinct noise vectors" in checks(noise)["repeated-noise"].sentence


def test_noise_that_comes_twice_in_a_row_is_repeated_and_not_of_another_shape():
    findings = record_of(np.repeat(normal(20, 100), 2, axis=0)).diagnose().findings
    assert "repeated-noise" in {finding.name for finding in findings}
    assert "noise-shape" not in {finding.name for finding in findings}


def test_noise_that_is_a_multiple_of_other_noise_is_not_called_the_same():
    sentence = checks(np.outer(normal(30), normal(60, seed=1)))["repeated-noise"].sentence
    assert "same noise" not in sentence
    assert "in 29 of 30 steps, the noise is a multiple of that of an earlier step" in sentence
    negated = normal(20, 60)
    negated[13] = -negated[4]
    assert "noise of step 13 is -1 times that of step 4" in checks(negated)["repeated-noise"].sentence


def test_no_noise_is_one_finding():
    diagnosis = record_of(np.zeros((20, 30)), [10, 20]).diagnose()
    assert [finding.name for finding in diagnosis.findings] == ["noise-variance"]
    assert diagnosis.findings[0].sentence == "There is no noise at all."
    assert "no noise" in diagnosis.likely_causes()[0]


SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(SHAPES, st.integers(0, 2**32), st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
def test_any_noise_gives_p_values_from_0_to_1(shape, seed, scale):
    noise = scale * normal(*shape, seed=seed)
    for leaves in (None, [1] * shape[1], [shape[1], 0]):
        for check in record_of(noise, leaves).diagnose().checks:
            assert 0 <= check.p_value <= 1
            assert np.isfinite(check.estimate)


@given(st.integers(0, 2**32), st.sampled_from([0.25, 4.0, 1024.0]))
def test_correlations_do_not_depend_on_the_scale(seed, scale):
    noise = normal(12, 10, seed=seed)
    noise = 3 * (noise + 0.1 * np.sign(noise))  # nothing so small that rounding could turn its sign
    one, other = checks(noise, [5, 5]), checks(scale * noise, [5, 5])
    for name in ("repeated-noise", "step-correlation", "leaf-correlation", "coordinate-correlation"):
        assert other[name].estimate == pytest.approx(one[name].estimate, rel=0.02)
    assert other["noise-shape"].p_value == pytest.approx(one["noise-shape"].p_value, rel=1e-3)


@given(st.integers(0, 2**32))
def test_the_order_of_steps_does_not_matter_where_it_should_not(seed):
    noise = normal(12, 10, seed=seed)
    one, other = checks(noise, [5, 5]), checks(noise[::-1], [5, 5])
    for name in ("noise-variance", "step-noise", "leaf-noise", "coordinate-noise", "leaf-correlation"):
        assert other[name].p_value == pytest.approx(one[name].p_value, rel=1e-6)
    assert other["repeated-noise"].p_value == pytest.approx(one["repeated-noise"].p_value, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_noise_that_is_not_finite_is_told_with_its_place(bad):
    record = record_of(normal(2, 5))
    with pytest.raises(
        InputError, match=r"Noise must be finite, got .* at coordinate 3 in step 2\. Did training diverge\?"
    ):
        record.observe_noise([0.0, 0.0, 0.0, bad, 0.0])
    assert record.diagnose() == record_of(normal(2, 5)).diagnose()  # the bad step was not taken in


@pytest.mark.parametrize("bad", [np.zeros(4), np.zeros((5, 1)), np.array(["a"] * 5), np.zeros(0)])
def test_noise_of_another_shape_is_refused(bad):
    with pytest.raises(InputError, match="The noise of step 1 must be a vector of 5 numbers"):
        record_of(normal(1, 5)).observe_noise(bad)


def test_wrong_leaves_are_refused():
    with pytest.raises(InputError, match="leaves must have 5 coordinates in total, got 6"):
        record_of(normal(1, 5), [3, 3])
    record = record_of(normal(1, 5), [3, 2])
    with pytest.raises(InputError, match="Step 1 must have the same leaves as the first step"):
        record.observe_noise(np.zeros(5), [2, 3])
    with pytest.raises(InputError, match="size of leaf 1"):
        record_of(normal(1, 5), [6, -1])


def test_a_collector_without_observations_has_no_diagnosis():
    with pytest.raises(InputError, match=r"No step was observed\. Did training run\?"):
        Diagnostics().diagnose()


def test_a_large_model_is_sampled_and_every_leaf_is_seen():
    sizes = [3, 1_100_000, 5, 100_000, 1]
    layout = Layout.of(sum(sizes), sizes)
    assert layout.chosen.size <= 2**20
    assert (np.diff(layout.chosen) > 0).all()
    assert (layout.sizes >= np.minimum(sizes, 256)).all()
    offsets = np.cumsum(sizes) - sizes
    for leaf, offset in enumerate(offsets):
        first = layout.chosen[layout.starts[leaf]]
        assert first == offset
    record = Diagnostics()
    for step in range(3):
        noise = normal(sum(sizes), seed=step)
        noise[1_100_003:1_100_008] = 0.0
        record.observe_noise(noise, sizes)
    found = {finding.name for finding in record.diagnose().findings}
    assert found == {"leaf-noise", "coordinate-noise"}


def test_long_trainings_keep_their_first_and_last_steps():
    record = Diagnostics()
    rng = np.random.default_rng(0)
    first = rng.standard_normal(50)
    record.observe_noise(first, known=rng.standard_normal(50), batch_size=9)
    for _ in range(4500):
        noise, known = rng.standard_normal((2, 50))
        record.observe_noise(noise, known=known, batch_size=rng.poisson(9))
    assert record.diagnose(1 - LEVEL).findings == ()
    record.observe_noise(first, known=np.zeros(50))
    finding = record.diagnose().findings[0]
    assert finding.name == "repeated-noise"
    assert "Step 4501 repeats the noise of step 0" in finding.sentence

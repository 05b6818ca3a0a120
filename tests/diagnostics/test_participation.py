"""Tests of the batches: what they compute, and what they do at the edges."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statistical_limits import LEVEL

from dpaudit import InputError
from dpaudit.diagnostics import Diagnostics, _row_digests
from dpaudit.diagnostics._row_digests import RowRecord


def record_of(batches, num_examples, sample_rate=0.2):
    record = Diagnostics(sample_rate=sample_rate)
    for batch in batches:
        record.observe_batch(batch, num_examples)
    return record


def checks(batches, num_examples, sample_rate=0.2):
    found = record_of(batches, num_examples, sample_rate).diagnose().checks
    return {check.name: check for check in found}


def poisson(num_steps, num_examples, sample_rate, seed=0):
    rng = np.random.default_rng(seed)
    return [np.flatnonzero(rng.random(num_examples) < sample_rate) for _ in range(num_steps)]


def test_the_same_batch_in_many_steps_is_found_without_a_warning():
    """Some numbers of participations are so unlikely that their probabilities underflow."""
    with np.errstate(all="raise", under="ignore"):
        found = checks([np.arange(256)] * 2500, 1024, 0.25)
    assert found["participation-counts"].p_value < 1e-100
    assert found["batch-overlap"].p_value < 1e-100


@pytest.fixture(scope="module")
def all_trainings():
    """Every training of 2 steps and 4 examples: its probability, and all p-values."""
    rate, found = 0.3, []
    for bits in itertools.product((False, True), repeat=8):
        present = np.array(bits).reshape(2, 4)
        made = checks(map(np.flatnonzero, present), 4, rate)
        probability = rate ** present.sum() * (1 - rate) ** (8 - present.sum())
        found.append((probability, {name: check.p_value for name, check in made.items()}))
    return found


@pytest.mark.parametrize(
    "name",
    [
        "batch-sizes",
        "participation-counts",
        "batch-overlap",
        "repeated-batches",
        "sample-rate",
        "favoured-example",
    ],
)
def test_p_values_are_valid_over_all_trainings_of_a_tiny_size(all_trainings, name):
    for level in sorted({p_values[name] for _, p_values in all_trainings}):
        probability = sum(probability for probability, p_values in all_trainings if p_values[name] <= level)
        assert probability <= level + 1e-12


def test_rate_and_most_frequent_example_are_binomial():
    batches = [[0, 1], [0], [0, 2, 4], [0]]
    found = checks(batches, 5, 0.2)
    rate = 0.2 * 1.001
    assert found["sample-rate"].p_value == pytest.approx(stats.binom.sf(6, 20, rate))
    assert found["sample-rate"].estimate == pytest.approx(7 / 20 / 0.2)
    assert found["favoured-example"].p_value == pytest.approx(5 * rate**4)
    assert "Example 0 is in 4 of 4 batches" in found["favoured-example"].sentence


def test_overlap_is_counted_between_consecutive_batches():
    batches = [[0, 1, 2], [2, 3], [3, 2], []]
    expected = (3 * 2 + 2 * 2) / 10
    assert checks(batches, 10)["batch-overlap"].estimate == pytest.approx((1 + 2) / expected)


def test_the_batches_that_share_most_are_named():
    batches = poisson(30, 500, 0.1)
    batches[21] = batches[4]
    check = checks(batches, 500, 0.1)["repeated-batches"]
    assert "steps 4 and 21 share 100 %" in check.sentence
    assert check.p_value < 1e-20


def test_a_lower_rate_than_claimed_is_a_note_and_no_finding():
    diagnosis = record_of(poisson(200, 300, 0.05), 300, sample_rate=0.1).diagnose(1 - LEVEL)
    assert diagnosis.findings == ()
    assert "below the claimed 0.1" in diagnosis.notes[0]


def test_an_example_twice_in_a_batch_is_a_finding():
    diagnosis = record_of([*poisson(20, 50, 0.2), [3, 3]], 50).diagnose()
    assert [finding.name for finding in diagnosis.findings] == ["duplicate-examples"]


@pytest.mark.parametrize("members", [np.zeros(0, dtype=int), np.arange(40)])
def test_a_rate_of_zero_or_one_that_is_claimed_is_no_finding(members):
    rate = 1.0 if len(members) else 1e-6
    diagnosis = record_of([members] * 30, 40, sample_rate=rate).diagnose()
    assert diagnosis.findings == ()


def test_sizes_alone_tell_a_fixed_batch_size():
    fixed, right = Diagnostics(sample_rate=0.1), Diagnostics(sample_rate=0.1)
    rng = np.random.default_rng(0)
    for _ in range(100):
        fixed.observe_batch_size(50, 500)
        right.observe_batch_size(int(rng.binomial(500, 0.1)), 500)
    assert [finding.name for finding in fixed.diagnose().findings] == ["batch-sizes"]
    assert right.diagnose(1 - LEVEL).findings == ()
    assert len(right.diagnose().checks) == 2
    other = Diagnostics(sample_rate=0.1)
    other.load_state_dict(fixed.state_dict())
    assert other.diagnose() == fixed.diagnose()


@given(st.integers(1, 8), st.integers(1, 12), st.floats(0, 1), st.integers(0, 2**32))
def test_any_batches_give_p_values_from_0_to_1(num_steps, num_examples, rate, seed):
    for claimed in (None, 0.5):
        for check in (
            record_of(poisson(num_steps, num_examples, rate, seed), num_examples, claimed).diagnose().checks
        ):
            assert 0 <= check.p_value <= 1
            assert np.isfinite(check.estimate)


@given(st.integers(0, 2**32))
def test_the_order_within_a_batch_does_not_matter(seed):
    batches = poisson(10, 30, 0.2, seed)
    assert checks(batches, 30) == checks([batch[::-1] for batch in batches], 30)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 5], "between 0 and 4, got 5"),
        ([-1], "between 0 and 4, got -1"),
        ([0.5], "whole numbers"),
        ([[1], [2]], "whole numbers"),
        ([np.nan], "whole numbers"),
    ],
)
def test_batches_that_cannot_be_are_refused(indices, message):
    with pytest.raises(InputError, match=message):
        Diagnostics().observe_batch(indices, 5)


def test_sizes_and_examples_are_not_mixed_and_the_data_set_stays():
    sizes, members = Diagnostics(), Diagnostics()
    sizes.observe_batch_size(2, 5)
    members.observe_batch([1, 2], 5)
    with pytest.raises(InputError, match="Pass the size of the batch"):
        sizes.observe_batch([1, 2], 5)
    with pytest.raises(InputError, match="Pass the examples of the batch"):
        members.observe_batch_size(2, 5)
    with pytest.raises(InputError, match="num_examples must be 5, as in earlier steps, got 6"):
        members.observe_batch([1], 6)
    with pytest.raises(InputError, match="size must be at most num_examples=5, got 6"):
        sizes.observe_batch_size(6, 5)
    with pytest.raises(InputError, match="sample_rate must be above 0 and at most 1, got 0"):
        Diagnostics(sample_rate=0.0)


def digests(rows):
    """Different numbers for different rows, in no order."""
    mixed = np.asarray(rows).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def found_by_rows(batches, num_examples, sample_rate=0.1):
    """The p-values of batches of which only the rows are known, and what is not tested."""
    record = RowRecord(num_examples)
    for batch in batches:
        record.observe(digests(batch))
    made, missing = record.checks(sample_rate)
    return {check.name: check.p_value for check in made}, missing


def shuffled(num_steps, num_examples, size, *, is_fixed):
    rng = np.random.default_rng(0)
    orders = [rng.permutation(num_examples) for _ in range(-(-num_steps * size // num_examples))]
    if is_fixed:
        orders = orders[:1] * len(orders)
    return np.concatenate(orders)[: num_steps * size].reshape(num_steps, size)


def favouring(num_steps, num_examples, rate):
    rng = np.random.default_rng(0)
    rates = np.where(np.arange(num_examples) < num_examples // 10, 3, 7 / 9) * rate
    return [np.flatnonzero(rng.random(num_examples) < rates) for _ in range(num_steps)]


@pytest.mark.parametrize(
    ("batches", "name"),
    [
        (shuffled(200, 300, 30, is_fixed=False), "batch-overlap"),
        (shuffled(200, 300, 30, is_fixed=True), "repeated-batches"),
        (np.random.default_rng(0).integers(0, 300, (200, 30)), "duplicate-examples"),
        ([np.tile(batch, 2) for batch in poisson(200, 300, 0.1)], "duplicate-examples"),
        (favouring(200, 300, 0.1), "favoured-example"),
    ],
    ids=["shuffled", "same order", "replacement", "two rows an example", "weights"],
)
def test_batches_that_are_not_poisson_are_found_by_their_rows(batches, name):
    p_values, missing = found_by_rows(batches, 300)
    assert p_values[name] < 1e-6
    assert all("may be identical" in text for text in missing)


@pytest.mark.parametrize("num_different", [300, 250, 100, 10])
def test_identical_examples_are_no_finding(num_different):
    rng = np.random.default_rng(0)
    for seed in range(3):
        rows = rng.integers(0, num_different, 300) if num_different < 300 else np.arange(300)
        p_values, _ = found_by_rows([rows[batch] for batch in poisson(200, 300, 0.1, seed)], 300)
        assert min(p_values.values(), default=1.0) > 0.001


def test_augmented_examples_are_no_finding_and_named():
    rng = np.random.default_rng(0)
    batches = poisson(200, 300, 0.1)
    flipped = [2 * batch + (rng.random(batch.size) < 0.5) for batch in batches]
    p_values, missing = found_by_rows(flipped, 300)
    assert p_values == {}
    assert ["augmented" in text for text in missing] == [True]
    p_values, missing = found_by_rows([rng.integers(0, 2**60, batch.size) for batch in batches], 300)
    assert p_values == {}
    assert ["augmented" in text for text in missing] == [True]


def test_rows_that_change_during_training_are_no_finding():
    """Inputs that are coarse at first make the batches of a phase alike."""
    batches = poisson(200, 300, 0.1)
    phases = [batch + 300 * (index >= 20) for index, batch in enumerate(batches)]
    p_values, missing = found_by_rows(phases, 300)
    assert p_values == {}
    assert ["augmented" in text for text in missing] == [True]
    p_values, missing = found_by_rows(phases[17:23], 300)  # not even a pass, with fewer rows than examples
    assert p_values == {}
    assert ["fewer than three passes" in text for text in missing] == [True]
    assert found_by_rows(batches, None)[0] == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_rate_that_rises_to_the_claimed_one_is_no_finding(seed):
    early, late = poisson(150, 2000, 0.05, seed), poisson(150, 2000, 0.1, seed + 10)
    p_values, _ = found_by_rows([*early, *late], 2000)
    assert {"batch-overlap", "repeated-batches", "favoured-example"} <= {*p_values}
    assert min(p_values.values()) > 0.001


def test_a_claim_without_sampling_allows_any_batches():
    assert found_by_rows(shuffled(200, 300, 30, is_fixed=True), 300, 1.0) == ({}, [])


def test_more_rows_than_can_be_followed_are_not_tested(monkeypatch):
    monkeypatch.setattr(_row_digests, "_MAX_DIGESTS", 200)
    p_values, missing = found_by_rows(shuffled(100, 300, 30, is_fixed=False), 300)
    assert p_values == {}
    assert ["more than" in text for text in missing] == [True]


def test_the_overlap_of_rows_is_valid_over_all_placements(monkeypatch):
    """Every way to place two rows in 3 and 2 of 5 steps, all equally likely."""
    monkeypatch.setattr(_row_digests, "_FEWEST_SHARED", 0.0)
    monkeypatch.setattr(_row_digests, "_FEWEST_PASSES", 0.0)
    found = []
    for first, second in itertools.product(
        itertools.combinations(range(5), 3), itertools.combinations(range(5), 2)
    ):
        batches = [[row for row, steps in enumerate((first, second)) if step in steps] for step in range(5)]
        found.append(found_by_rows(batches, 2, 0.5)[0])
    for name in ("batch-overlap", "repeated-batches"):
        values = np.array([p_values[name] for p_values in found])
        assert values.min() < 1 or name != "batch-overlap"
        assert all(np.mean(values <= level) <= level + 1e-12 for level in values)


@pytest.mark.parametrize(
    ("change", "text", "word"),
    [
        (lambda batch: batch[:33], "None of 300 batches has more than 33", "cut"),
        (lambda batch: batch if len(batch) > 25 else np.arange(25), "has fewer than 25", "skipped"),
    ],
    ids=["cut", "filled up"],
)
def test_sizes_that_end_at_a_limit_are_found_and_named(change, text, word):
    rng, record = np.random.default_rng(2), Diagnostics()
    for _ in range(300):
        batch = change(rng.permutation(np.flatnonzero(rng.random(300) < 0.1)))
        record.observe_batch_size(len(batch), 300)
    found = record.diagnose()
    assert [finding.name for finding in found.findings] == ["batch-sizes"]
    assert text in found.findings[0].sentence
    assert word in found.likely_causes()[0]


def test_a_batch_that_recurs_is_the_cause_of_what_follows_from_it():
    rng, record = np.random.default_rng(3), Diagnostics()
    batches = [np.flatnonzero(rng.random(300) < 0.1) for _ in range(10)]
    for number in range(100):
        record.observe_batch(batches[number % 10], 300)
    assert "reseeded in every epoch" in record.diagnose().likely_causes()[0]

"""Sums and batches of steps: what no correct run has is a finding, in a resumed run too."""

import numpy as np
import pytest
from statistical_limits import LEVEL

from dpaudit import InputError
from dpaudit.diagnostics import BatchRecord, ClaimedStep, Diagnosis, ObservedStep, SumChange, SumRecord

NUM_EXAMPLES, RATE = 300, 0.1
CLAIMED = ClaimedStep(noise_multiplier=1.0, sample_rate=RATE)


def step(norm, rows, **fields):
    return ObservedStep(example_sum_norm=norm, num_rows=rows, **fields)


def names(results):
    return [finding.name for finding in results.certain]


def test_a_sum_at_its_limit_is_correct_in_any_precision():
    for eps, norm in [(2.0**-23, 4.002), (2.0**-8, 4.1)]:
        record = SumRecord()
        record.observe(step(norm, 4, eps=eps))
        assert not record.results(CLAIMED).certain
        record.observe(step(1.1 * norm, 4, eps=eps))
        assert names(record.results(CLAIMED)) == ["sum-norm"]


@pytest.mark.parametrize(
    ("wrong", "name", "sentence"),
    [
        (step(12.0, 10), "sum-norm", "allow in 1 of 3 steps: in step 1, 10 rows have 1.2 times their limit."),
        (step(9.0, 10, sum_limit=8.0), "sum-norm", "10 rows have 1.125 times their limit."),
        (step(9.0, 10, sum_excess=1.5), "sum-norm", "10 rows have 1.5 times their limit."),
        (step(2.0, 0), "rows-drawn", "is not zero: in step 1, its norm is 2 clipping norms."),
        (
            step(1.0, 9, sum_remainder=0.5),
            "sum-rebuilt",
            "not reset before 1 of 3 steps: in step 1",
        ),
        (
            step(1.0, 9, row_limit=1.1),
            "clipping-norm",
            "of the noise in 1 of 3 steps: in step 1, to 1.1 times",
        ),
        (step(1.0, 9, sum_changes=(SumChange(1, 3, False),)), "sum-rebuilt", "changes from 1 to 3 clipping"),
        (
            step(1.0, 9, sum_changes=(SumChange(1, 3, True),)),
            "sum-rebuilt",
            "between clipping and noise",
        ),
    ],
)
def test_a_wrong_sum_is_a_certain_finding(wrong, name, sentence):
    record, resumed = SumRecord(), SumRecord()
    record.observe(step(10.0, 10))
    record.observe(wrong)
    resumed.load_state_dict(record.state_dict())
    for each in (record, resumed):
        each.observe(step(0.0, 0))
        (finding,) = each.results(CLAIMED).certain
        assert (finding.name, sentence in finding.sentence) == (name, True)


def test_what_is_not_known_of_sums_is_named():
    record = SumRecord()
    assert record.results(CLAIMED).not_covered == ()
    record.observe(step(None, 10, sum_changes=(SumChange(3, 1, True),)))
    results = record.results(CLAIMED)
    assert "longer than their clipped rows allow" in results.not_covered[0]
    assert (results.certain, "scaled down between clipping and noise in 1 of 1" in results.notes[0]) == (
        (),
        True,
    )
    record.observe(step(np.inf, 10))
    results = record.results(CLAIMED)
    assert (results.certain, "1 sums were computed without" in results.not_covered[0]) == ((), True)


def test_only_as_many_rows_as_were_drawn_are_correct():
    record = BatchRecord()
    for drawn in (3, 0, 5):  # an empty batch may be filled
        record.add_drawn_batch(np.arange(drawn), 10)
    assert not any(record.may_be_padded(rows) for rows in range(4))
    assert record.may_be_padded(4)
    assert [record.match_step(rows) for rows in (3, 1, 5)] == [3, 0, 5]
    assert not record.results(CLAIMED).certain
    record.match_step(1)
    assert names(record.results(CLAIMED)) == ["loader-used"]


def test_batches_are_matched_with_steps_that_join_or_skip_them():
    record = BatchRecord()
    for drawn in (3, 4, 5, 6):
        record.add_drawn_batch(np.arange(drawn), 10)
    assert [record.match_step(rows) for rows in (7, 6)] == [7, 6]
    assert record.results(CLAIMED).notes[-1] == "1 of 2 steps use several draws of the sampler."


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda size, _: size, ""),
        (lambda size, _: min(size, 33), "Batches are cut to 33 rows: "),
        (lambda size, _: size // 2, "by the size of the batch alone, so whether an example is used depends"),
        (lambda size, _: 2 * size, "More rows were clipped than examples drawn in 120 of 120 steps"),
        (lambda size, index: size - index % 3, "Fewer rows were clipped than examples drawn in 80"),
    ],
    ids=["correct", "cut", "half", "twice", "some fewer"],
)
def test_rows_are_compared_with_drawn_batches_before_and_after_a_run_was_resumed(change, expected):
    rng, record = np.random.default_rng(1), BatchRecord()
    for index in range(120):
        batch = np.flatnonzero(rng.random(NUM_EXAMPLES) < RATE)
        record.add_drawn_batch(batch, NUM_EXAMPLES)
        record.observe(ObservedStep(num_rows=change(batch.size, index)))
        if index == 60:
            state, record = record.state_dict(), BatchRecord()
            record.load_state_dict(state)
    results = record.results(CLAIMED)
    texts = [finding.sentence for finding in results.certain]
    assert any(expected in text for text in (texts or results.notes or [""]))
    assert bool(texts) == bool(expected and "Fewer" not in expected)
    assert all("cut to a size" in finding.cause for finding in results.certain if "More" not in expected)


def test_rows_are_compared_with_reported_batches():
    record = BatchRecord()
    for rows in (3, 1, 5):
        batch = np.arange(3 if rows else 0)
        record.observe(ObservedStep(batch=batch, num_examples=10, num_rows=rows))
    (finding,) = record.results(CLAIMED).certain
    expected = "More rows were clipped than examples drawn in 1 of 3 steps: in step 2, 5 rows of 3 drawn"
    assert finding.sentence == f"{expected} examples."


def test_reported_batches_that_are_not_those_of_the_steps_are_found():
    record, rng = BatchRecord(), np.random.default_rng(0)
    for _ in range(20):
        batch, rows = np.flatnonzero(rng.random(NUM_EXAMPLES) < RATE), rng.binomial(NUM_EXAMPLES, RATE)
        record.observe(ObservedStep(batch=batch, num_examples=NUM_EXAMPLES, num_rows=rows))
    (finding,) = record.results(CLAIMED).certain
    assert finding.name == "loader-used"
    assert "steps have more rows than examples were drawn, others have fewer: in step" in finding.sentence


def test_a_loop_that_starts_before_the_observer_is_not_compared():
    record = BatchRecord("start it inside")
    record.match_step(4)
    record.add_drawn_batch(np.arange(2), 10)
    record.match_step(9)
    assert record.results(CLAIMED).not_covered == ("start it inside",)
    assert not record.results(CLAIMED).certain


def test_batches_that_are_followed_and_reported_are_refused():
    record = BatchRecord()
    record.add_drawn_batch(np.arange(2), 10)
    with pytest.raises(InputError, match="remove observe_batch"):
        record.add_reported_batch(np.arange(2), 10)


def record_of_rows(sizes, *, is_exact=True):
    record = BatchRecord("which examples are unknown")
    record.tests_sizes = True
    for size in sizes:
        record.match_step(int(size), is_exact=is_exact)
    return record


@pytest.mark.parametrize(
    ("is_exact", "sample_rate", "text"),
    [(False, RATE, "is_padding_example="), (True, 0.4, "pass num_examples="), (True, RATE, None)],
)
def test_sizes_that_are_not_tested_are_named(is_exact, sample_rate, text):
    record = record_of_rows((9, 10, 12, 7), is_exact=is_exact)
    results = record.results(ClaimedStep(noise_multiplier=1.0, sample_rate=sample_rate))
    assert [check.name for check in results.checks] == ([] if text else ["batch-sizes"])
    gaps = [gap for gap in results.not_covered if gap.startswith("batch sizes are not tested")]
    assert [text in gap for gap in gaps] == ([True] if text else [])
    every_example = ClaimedStep(noise_multiplier=1.0, sample_rate=1.0)
    assert record.results(every_example).not_covered == ("which examples are unknown",)


def test_correct_batches_of_unknown_examples_have_valid_p_values():
    rng, p_values = np.random.default_rng(0), []
    for _ in range(400):
        record = record_of_rows(rng.binomial(NUM_EXAMPLES, RATE, 60))
        p_values += [check.p_value for check in record.results(CLAIMED).checks]
    assert len(p_values) == 400
    assert np.mean(np.array(p_values) < 0.05) < 0.08


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda size: size, None),
        (lambda size: 2 * size, "always a multiple of 2: does an example become 2 rows"),
        (lambda size: max(size, 20), "filled up to 20 rows with padding"),
        (lambda size: 3 * size + 1, "does an example become several rows"),
        (lambda _: 20, "batches of a fixed size"),
    ],
    ids=["correct", "doubled", "padded", "tripled", "fixed"],
)
def test_the_cause_of_numbers_of_rows_that_poisson_sampling_does_not_have(change, expected):
    record = record_of_rows(map(change, np.random.default_rng(0).binomial(200, 0.1, 300)))
    diagnosis = Diagnosis.of(record.results(CLAIMED).checks, confidence=1 - LEVEL)
    assert [finding.name for finding in diagnosis.findings] == ([] if expected is None else ["batch-sizes"])
    assert expected is None or expected in diagnosis.likely_causes()[0]

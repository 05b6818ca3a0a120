"""Observers besides that of Opacus check sums and batches too, or say that they do not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_runs import DELTA, INPUTS, NUM_EXAMPLES, RATE, TARGETS, private, start, train
from torch import nn

import dpaudit
from dpaudit.diagnostics import BatchRecord, ClaimedStep, Diagnosis
from dpaudit.diagnostics._row_digests import RowRecord
from dpaudit.observers import jax_privacy
from dpaudit.observers.jax_privacy._clipping import JaxClip
from dpaudit.observers.step import observe_step
from dpaudit.report import Run
from dpaudit.training import DPSGD, SGD, Diagnose, Training
from dpaudit.training.broken import Unclipped
from dpaudit.training.data import Dataset

jax_is_new = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
CLAIMED = ClaimedStep(noise_multiplier=1.0, sample_rate=RATE)


def names(found):
    return {finding.name for finding in (found.findings if hasattr(found, "findings") else found.certain)}


@jax_is_new
def test_batches_of_jax_are_tested_by_their_padding_and_rows_alone():
    found = train(num_steps=40).recorder.diagnose()
    assert "batch-sizes" in {check.name for check in found.checks}
    assert any("pass num_examples=" in text for text in found.not_covered)
    assert not names(found)
    assert any("pass num_examples=" in text for text in found.not_covered)


def fixed_batches(num_steps, size, rng):
    for _ in range(num_steps):
        yield rng.choice(NUM_EXAMPLES, size, replace=False)


def shuffled_batches(num_steps, size, rng):
    orders = [rng.permutation(NUM_EXAMPLES) for _ in range(num_steps * size // NUM_EXAMPLES)]
    return np.concatenate(orders).reshape(num_steps, size)


def observed(chosen, *, copies=1, is_reported=True, **more):
    """The diagnosis of steps with these batches."""
    known = {"sample_rate": RATE, "delta": DELTA, "seed": 0, "num_canaries": 8, **more}
    grad_fn, privatizer, recorder = jax_privacy.observe(*private(), **known)
    params = start()
    state = privatizer.init(params)

    @jax.jit
    def step(state, batch):
        padding = jnp.zeros(len(batch[0]), bool)
        return privatizer.update(grad_fn(params, batch, is_padding_example=padding), state)[1]

    for members in chosen:
        if is_reported:
            recorder.observe_batch(members, NUM_EXAMPLES)
        places = np.tile(members, copies)
        state = step(state, (INPUTS[places], TARGETS[places]))
    return recorder.diagnose()


@jax_is_new
def test_batches_of_one_size_are_found_in_jax():
    found = observed(fixed_batches(30, 10, np.random.default_rng(0)))
    assert "batch-sizes" in names(found)
    assert "rows-drawn" not in names(found)


@jax_is_new
def test_shuffled_epochs_are_found_in_jax_by_the_rows_of_batches():
    chosen = shuffled_batches(60, 10, np.random.default_rng(0))
    found = observed(chosen, is_reported=False, num_examples=NUM_EXAMPLES)
    assert {"batch-sizes", "batch-overlap"} <= names(found)
    assert {"favoured-example", "duplicate-examples", "sample-rate"} <= {one.name for one in found.checks}
    assert [text for text in found.not_covered if "largest gradient of the batch" not in text] == []
    assert ["always the same row" in text for text in found.assumptions] == [True]


@jax_is_new
def test_several_rows_an_example_are_found_in_jax():
    found = observed(fixed_batches(3, 10, np.random.default_rng(0)), copies=2)
    assert "rows-drawn" in names(found)


@jax_is_new
@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, np.uint8, np.int32, bool, np.complex64, jnp.int4, jnp.uint2, jnp.float4_e2m1fn],
)
def test_digests_of_rows_are_equal_for_equal_rows_only(dtype):
    rows = np.random.default_rng(0).integers(0, 2, (40, 12))
    rows = np.concatenate([np.unique(rows, axis=0)[:30], rows[:1] * 0 + 1])[[*range(31), 3, 7, 7]]
    clip = JaxClip(private()[0])
    padding = np.arange(34) == 33
    found = np.asarray(clip.digests(({}, (rows.astype(dtype), np.ones(34))), {"is_padding_example": padding}))
    assert len(np.unique(found[:31], axis=0)) == len(np.unique(rows[:31], axis=0))
    assert (found[[31, 32]] == found[[3, 7]]).all()
    assert not found[33].any()
    assert found[:33].any(axis=1).all()
    other = clip.digests(({}, (rows.astype(dtype), np.zeros(34))), {})
    assert (np.asarray(other) != found).any(axis=1).all()  # targets belong to the row


@jax_is_new
@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.int4])
def test_digests_of_rows_do_not_depend_on_zeros_at_the_end_of_any_axis(dtype):
    rows = np.random.default_rng(0).integers(1, 4, (5, 3, 4))
    clip, targets = JaxClip(private()[0]), np.arange(5)
    short, long, moved = (
        np.asarray(clip.digests(({}, (np.pad(rows, [(0, 0), *sizes]).astype(dtype), targets)), {}))
        for sizes in ([(0, 0), (0, 0)], [(0, 3), (0, 5)], [(1, 0), (0, 0)])
    )
    assert (short == long).all()
    assert (short != moved).any(axis=1).all()  # zeros at the beginning move all numbers


def rows_of(batches, num_examples):
    """The record of an observer that knows the rows of these batches, but not their examples."""
    record = BatchRecord("which examples are unknown")
    record.tests_sizes, record.rows = True, RowRecord(num_examples)
    for batch in batches:
        record.match_step(len(batch))
        record.rows.observe(np.asarray(batch, np.uint64) + np.uint64(1))
    return record.results(CLAIMED)


def test_what_tests_of_rows_assume_is_part_of_the_result():
    rng = np.random.default_rng(0)
    batches = [np.flatnonzero(rng.random(NUM_EXAMPLES) < RATE) for _ in range(60)]
    found = rows_of(batches, NUM_EXAMPLES)
    (text,) = found.assumptions
    assert text.startswith(
        "each example is always the same row, and num_examples=200 is the number of examples"
    )
    assert rows_of(batches[:10], NUM_EXAMPLES).assumptions == (text.split(", and ")[1],)  # sizes alone
    assert rows_of(batches, None).assumptions == ()
    scores = dpaudit.Observations.from_presence(rng.standard_normal(900), rng.random(900) < 0.5)
    result = dpaudit.audit(scores, claim=dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=DELTA))
    result = replace(result, diagnosis=Diagnosis.of((), confidence=0.99).joined(found))
    run = Run.of(result, name="")
    for shown in (result.details(), result.diagnosis, run.assumptions):
        assert text in str(shown)
    for values in (result.to_dict(), run.to_dict()):
        assert values["diagnosis"]["assumptions"] == [text]


@pytest.fixture
def diagnosed():
    def go(**options):
        torch.manual_seed(0)
        inputs = torch.randn(200, 8)
        data = Dataset(10 * inputs, (inputs[:, 0] > 0).long(), num_classes=2)
        settings = DPSGD(
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=0.1,
            num_steps=20,
            optimizer=SGD(learning_rate=0.1),
        )
        hook = Diagnose()
        for _ in Training(nn.Linear(8, 2), data, settings, hooks=[hook], **options).run():
            pass
        return hook.diagnose()

    return go


def test_sums_of_the_native_engine_are_compared_with_their_limit(diagnosed):
    assert "sum-norm" not in names(diagnosed())
    assert "sum-norm" in names(diagnosed(mechanism=Unclipped(noise_multiplier=1.0, max_grad_norm=1.0)))


def test_a_step_function_says_that_its_batches_are_not_tested():
    rng = np.random.default_rng(0)
    recorder = observe_step(
        lambda rows: rows.clip(-1, 1).sum(axis=0) + rng.standard_normal(rows.shape[1]),
        np.zeros((0, 80)),
        claim=dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=DELTA),
        max_grad_norm=1.0,
        num_steps=20,
        seed=0,
    )
    assert any("every step gets the same batch" in text for text in recorder.diagnose().not_covered)

"""A loop that trains on other batches than its loader draws is found; unusual loops over it are not."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from opacus.data_loader import DPDataLoader
from opacus_runs import DELTA, train_step
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.diagnostics import ClaimedStep, Diagnosis
from dpaudit.observers.opacus import observe
from dpaudit.observers.opacus._prepared import LoaderBatches, PreparedTraining

NUM_EXAMPLES, RATE, STEPS = 400, 0.05, 20
DATA = TensorDataset(torch.zeros(NUM_EXAMPLES, 1))


class Loop:
    """The steps of a training run, of which only the numbers of rows are observed."""

    def __init__(self, seed, *, rate=RATE, num_steps=STEPS, **loading):
        torch.manual_seed(seed)
        self.rng, self.rate, self.num_steps = np.random.default_rng(seed), rate, num_steps
        self.loader = DPDataLoader(DATA, sample_rate=rate, **loading)

    def steps(self, num_rows):
        """Run steps of so many rows; of padded steps, there are two numbers, without and with padding."""
        batches = LoaderBatches(PreparedTraining(optimizer=None, loader=self.loader), is_distributed=False)
        is_padded = False
        with batches.installed(SimpleNamespace(guarded=lambda note: note)):
            for rows in itertools.islice(num_rows(self), self.num_steps):
                examples, padded = rows if isinstance(rows, tuple) else (rows, rows)
                is_padded |= batches.record.may_be_padded(padded) and padded > examples
                batches.record.match_step(examples if is_padded else padded)
        results = batches.record.results(ClaimedStep(noise_multiplier=1.0, sample_rate=self.rate))
        return Diagnosis.of((), confidence=0.975).joined(results)

    def batches(self, loader=None):
        """The sizes of the batches of many epochs."""
        for (inputs,) in itertools.chain.from_iterable(itertools.repeat(loader or self.loader)):
            yield len(inputs)


def names(facts):
    return {fact.name for fact in facts}


# loops that use other batches than those that were drawn


def original_loader(loop):
    yield from loop.batches(DataLoader(DATA, batch_size=20, shuffle=True))


def original_loader_after_a_look(loop):
    next(iter(loop.loader))
    yield from original_loader(loop)


def larger_batches(loop):
    yield from loop.batches(DPDataLoader(DATA, sample_rate=2 * RATE))


def cached_batch(loop):
    yield from itertools.repeat(next(loop.batches()))


def cached_batches(loop):
    yield from itertools.cycle(list(itertools.islice(loop.batches(), 5)))


def kept_batch_while_others_are_drawn(loop):
    batches = loop.batches()
    kept = next(batches)
    yield kept
    for _ in batches:
        yield kept


def another_private_loader_beside_it(loop):
    for _, rows in zip(loop.batches(), loop.batches(DPDataLoader(DATA, sample_rate=RATE)), strict=False):
        yield rows


def fixed_batches_of_all_examples_drawn(loop):
    rest = 0
    for rows in loop.batches():
        rest += rows
        yield from [20] * (rest // 20)
        rest %= 20


def another_loader_later(loop):
    yield from itertools.islice(loop.batches(), 10)
    yield from loop.batches(DataLoader(DATA, batch_size=64))


def epoch_that_is_kept(loop):
    yield from itertools.cycle(list(itertools.islice(loop.batches(), 12)))


OTHERS = [
    original_loader,
    original_loader_after_a_look,
    larger_batches,
    cached_batch,
    cached_batches,
    kept_batch_while_others_are_drawn,
    another_private_loader_beside_it,
    fixed_batches_of_all_examples_drawn,
    another_loader_later,
    epoch_that_is_kept,
]


@pytest.mark.parametrize("loop", OTHERS, ids=lambda loop: loop.__name__)
def test_other_batches_than_those_of_the_loader_are_found_with_every_seed(loop):
    for seed in range(10):
        findings = names(Loop(seed).steps(loop).findings)
        assert findings & {"loader-used", "rows-drawn"}, seed
        assert "loader-used" in findings or loop is kept_batch_while_others_are_drawn, seed


# correct loops


def each_batch(loop):
    yield from loop.batches()


def shapes_looked_at(loop):
    next(iter(loop.loader))
    yield from loop.batches()


def first_batch_looked_at(loop):
    batches = loop.batches()
    next(batches)
    yield from batches


def epochs_that_end_early(loop):
    while True:
        yield from itertools.islice(loop.batches(), 4)


def evaluated_between_epochs(loop):
    while True:
        for num_batches, is_training in ((20, True), (20, False)):
            for rows in itertools.islice(loop.batches(), num_batches):
                if is_training:
                    yield rows


def evaluated_within_epochs(loop):
    for index, rows in enumerate(loop.batches()):
        yield rows
        if index % 5 == 0:
            list(itertools.islice(loop.batches(), 2))


def drawn_ahead(loop):
    batches = loop.batches()
    ahead = list(itertools.islice(batches, 3))
    for rows in batches:
        ahead.append(rows)
        yield ahead.pop(0)


def epoch_in_a_list(loop):
    while True:
        yield from list(itertools.islice(loop.batches(), 20))


def epoch_in_a_shuffled_list(loop):
    while True:
        yield from loop.rng.permutation(list(itertools.islice(loop.batches(), 20))).tolist()


def padded_to_a_multiple(loop):
    for rows in drawn_ahead(loop):
        yield rows, rows + -rows % 16


def examples_left_out(loop, batches=each_batch):
    for rows in batches(loop):
        yield loop.rng.binomial(rows, 0.9)


def examples_left_out_of_a_list(loop):
    yield from examples_left_out(loop, epoch_in_a_shuffled_list)


CORRECT = [
    each_batch,
    shapes_looked_at,
    first_batch_looked_at,
    epochs_that_end_early,
    evaluated_between_epochs,
    evaluated_within_epochs,
    drawn_ahead,
    epoch_in_a_list,
    epoch_in_a_shuffled_list,
    padded_to_a_multiple,
    examples_left_out,
    examples_left_out_of_a_list,
]
SMALL = {"rate": 0.004, "num_steps": 50}  # empty batches, and many of the same size


@pytest.mark.filterwarnings("ignore:First batch is empty")
@pytest.mark.parametrize(
    "options", [{}, SMALL, SMALL | {"rand_on_empty": True}], ids=["usual", "small", "filled"]
)
@pytest.mark.parametrize("loop", CORRECT, ids=lambda loop: loop.__name__)
def test_a_loop_over_the_batches_of_the_loader_has_no_finding_and_no_fact(loop, options):
    for seed in range(10):
        diagnosis = Loop(seed, **options).steps(loop)
        assert not names(diagnosis.findings) & {"loader-used", "rows-drawn"}, seed
        assert not diagnosis.to_check, seed


def test_workers_that_draw_ahead_are_no_finding():
    diagnosis = Loop(0, num_workers=1, prefetch_factor=4).steps(epochs_that_end_early)
    assert not diagnosis.findings
    assert not diagnosis.to_check


def test_another_private_loader_at_the_same_rate_is_to_check():
    """It may be an iterator of the same loader that was made before the observer."""
    diagnosis = Loop(0).steps(lambda loop: loop.batches(DPDataLoader(DATA, sample_rate=RATE)))
    (fact,) = diagnosis.to_check
    assert not diagnosis.findings
    assert fact.sentence == (
        "loader= drew batches for none of 20 steps: the loop uses another loader, or one that started before "
        "observe()."
    )


def skipped(loop, *, where=lambda index, _: index % 10 == 5):
    for index, rows in enumerate(loop.batches()):
        if not where(index, rows):
            yield rows


def test_batches_that_are_drawn_and_not_used_are_to_check_with_every_seed():
    for seed in range(10):
        diagnosis = Loop(seed, num_steps=54).steps(skipped)
        (fact,) = diagnosis.to_check
        assert (fact.name, fact.sentence) == ("unused-batches", "6 of 60 drawn batches have no step.")
        assert not names(diagnosis.findings) & {"loader-used", "rows-drawn"}


def test_empty_batches_that_are_left_out_are_to_check():
    (fact,) = Loop(0, **SMALL).steps(lambda loop: skipped(loop, where=lambda _, rows: rows == 0)).to_check
    assert fact.sentence.endswith("drawn batches have no step, all of them empty.")


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_an_audit_says_which_batches_were_drawn_and_not_used(private, mode):
    made = private(noise_multiplier=1.0, num_examples=400, batch_size=20, grad_sample_mode=mode)
    options = {"loader": made.loader, "module": made.model, "delta": DELTA, "num_canaries": 16, "seed": 0}
    with observe(made.optimizer, **options) as recorder:
        for index, batch in enumerate(itertools.chain(made.loader, made.loader)):
            if index % 10 != 5:
                train_step(made, *batch)
    result = recorder.audit()
    assert not result.is_violation
    assert [fact.sentence for fact in result.to_check] == ["4 of 40 drawn batches have no step."]
    assert "4 of 40 drawn batches" in str(result)

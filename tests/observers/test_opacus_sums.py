"""Sums, rows and batches of an Opacus loop are compared with what clipping added and the loader drew."""

import itertools
import math

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_runs import DELTA, OTHER_KINDS, run, small_data, train_step, without_clipping
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, WeightedRandomSampler

from dpaudit.diagnostics import ClaimedStep
from dpaudit.observers.opacus import observe
from dpaudit.observers.opacus._clipping import PerSampleClip
from dpaudit.observers.opacus._sums import ClippingNorms

STEPS = 40
CERTAIN = {"rows-drawn", "sum-norm", "sum-rebuilt"}
SAMPLING = {"batch-sizes", "participation-counts", "batch-overlap", "repeated-batches", "duplicate-examples"}


@pytest.fixture
def diagnosed(private):
    """The diagnosis of a loop; the loop gets what was made."""

    def go(loop=lambda made: run(made, STEPS), *, observer=None, change=None, **options):
        made = private(**({"noise_multiplier": 1.0, "num_steps": STEPS} | options))
        if change is not None:
            change(made)
        known = {"loader": made.loader, "delta": DELTA, "seed": 0, "num_canaries": 16}
        with observe(made.optimizer, module=made.model, **(known | (observer or {}))) as recorder:
            loop(made)
        return recorder.diagnose(noise_multiplier=1.0)

    return go


def names(diagnosis):
    return {finding.name for finding in diagnosis.findings}


def untested(diagnosis):
    return [text for text in diagnosis.not_covered if text.startswith("batches are not tested, and rows")]


def sentence(diagnosis, name):
    return next(finding.sentence for finding in diagnosis.findings if finding.name == name)


def each(made, change=lambda *batch: batch, num_steps=STEPS, loader=None, after_backward=lambda *_: None):
    """A loop whose batches are changed, or their gradients before the step."""
    for batch in itertools.islice(forever(loader or made.loader), num_steps):
        made.optimizer.zero_grad()
        inputs, targets = change(*batch)
        made.criterion(made.model(inputs), targets).backward()
        after_backward(made, inputs)
        made.optimizer.step()


def forever(loader):
    return itertools.chain.from_iterable(itertools.repeat(loader))


MODES = {
    "flat": {},
    **OTHER_KINDS,
    "sum": {"loss_reduction": "sum"},
    "empty batches": {"num_examples": 40, "batch_size": 1},
    "filled batches": {"num_examples": 40, "batch_size": 1, "rand_on_empty": True},
}


@pytest.mark.few(5)
@pytest.mark.filterwarnings("ignore:First batch is empty")
@pytest.mark.parametrize("mode", MODES)
def test_correct_sums_and_batches_of_any_mode_have_no_finding(diagnosed, mode):
    found = diagnosed(**MODES[mode])
    assert not names(found) & (CERTAIN | SAMPLING)
    assert not untested(found)
    assert not [note for note in found.notes if "rows were" in note or "several draws" in note]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_split_batches_are_summed_and_counted_together(diagnosed, mode):
    def loop(made):
        with BatchMemoryManager(
            data_loader=made.loader, max_physical_batch_size=4, optimizer=made.optimizer
        ) as split:
            run(made, STEPS, split)

    found = diagnosed(loop, grad_sample_mode=mode)
    assert not names(found) & (CERTAIN | SAMPLING)
    assert {check.name for check in found.checks} >= SAMPLING


def ahead(loader, count=2):
    """Batches of a loader that draws some of them ahead."""
    queue = []
    for batch in forever(loader):
        queue.append(batch)
        if len(queue) > count:
            yield queue.pop(0)


@pytest.mark.parametrize("skipped", [0, 3], ids=["all are used", "some are skipped"])
def test_batches_that_are_drawn_ahead_or_skipped_are_no_finding(diagnosed, skipped):
    def loop(made):
        batches = ahead(made.loader)
        for number in range(STEPS):
            inputs, targets = next(batches)
            if skipped and number % skipped == 0:
                continue
            train_step(made, inputs, targets)

    assert not names(diagnosed(loop)) & (CERTAIN | SAMPLING)


def test_epochs_that_end_early_are_no_finding(diagnosed):
    def loop(made):
        for _ in range(10):
            each(made, num_steps=4)

    assert not names(diagnosed(loop)) & (CERTAIN | SAMPLING)


def test_a_ghost_loop_that_bypasses_the_private_criterion_is_named(diagnosed):
    def change(made):
        made.criterion = nn.CrossEntropyLoss()

    found = diagnosed(grad_sample_mode="ghost", change=change)
    assert found.findings[0].name == "rows-drawn"
    assert found.findings[0].sentence.startswith(f"No row was clipped in {STEPS} of {STEPS} steps")
    assert "bypass the private loss" in found.likely_causes()[0]
    assert "rows-drawn" in names(
        diagnosed(grad_sample_mode="ghost", change=change, observer={"loader": None})
    )


def test_several_rows_an_example_are_found(diagnosed):
    def loop(made):
        each(made, lambda inputs, targets: (inputs.repeat(2, 1), targets.repeat(2)))

    found = diagnosed(loop)
    assert "rows-drawn" in names(found)
    assert sentence(found, "rows-drawn").startswith("More rows were clipped than examples drawn")


def padded(inputs, targets):
    missing = -len(inputs) % 16
    zeros = torch.zeros(missing, *inputs.shape[1:])
    return torch.cat([inputs, zeros]), torch.cat([targets, targets.new_full((missing,), -100)])


def test_padding_that_has_a_gradient_is_found_and_padding_without_is_not(diagnosed):
    assert not names(diagnosed(lambda made: each(made, padded))) & CERTAIN

    def loop(made):
        each(made, lambda *batch: (padded(*batch)[0], padded(*batch)[1].clamp(min=0)))

    assert "rows-drawn" in names(diagnosed(loop))


def test_batches_cut_to_a_size_are_found_and_rows_dropped_one_by_one_are_a_note(diagnosed):
    found = diagnosed(lambda made: each(made, lambda *batch: [part[:8] for part in batch]))
    assert "Batches are cut to 8 rows" in sentence(found, "rows-drawn")

    def keep(inputs, targets):
        return inputs[inputs[:, 0] > -1], targets[inputs[:, 0] > -1]

    found = diagnosed(lambda made: each(made, keep))
    assert "rows-drawn" not in names(found)
    assert any("Fewer rows were clipped" in note for note in found.notes)


def test_batches_that_are_used_again_are_found(diagnosed):
    def loop(made):
        each(made, loader=list(made.loader))

    assert "loader= drew no batch for 20 of 40 steps" in sentence(diagnosed(loop), "loader-used")


class Leftover(DPOptimizer):
    """Leaves a part of a sum for the next step."""

    def zero_grad(self, set_to_none=False):
        last = [value.summed_grad for value in self.params]
        super().zero_grad(set_to_none)
        for value, own in zip(self.params, last, strict=True):
            value.summed_grad = None if own is None else 0.2 * own.detach()


def test_a_sum_that_is_not_reset_is_found(diagnosed):
    def change(made):
        made.optimizer.__class__ = Leftover

    found = diagnosed(change=change)
    assert names(found) & CERTAIN == {"sum-rebuilt"}
    assert "The sum is not reset before" in sentence(found, "sum-rebuilt")


@pytest.mark.parametrize("factor", [None, 0.5, 2.0], ids=["added", "halved", "doubled"])
def test_a_sum_that_changes_between_clipping_and_noise_is_found_unless_it_shrinks(diagnosed, factor):
    class Changing(DPOptimizer):
        def _check_skip_next_step(self, pop_next=True):
            for value in self.params:
                value.summed_grad = value.summed_grad + 0.5 if factor is None else factor * value.summed_grad
            return super()._check_skip_next_step(pop_next)

    def change(made):
        made.optimizer.__class__ = Changing

    found = diagnosed(change=change)
    if factor == 0.5:
        assert not names(found) & CERTAIN
        assert any("scaled down" in note for note in found.notes)
    else:
        assert found.findings[0].name == "sum-rebuilt"
        assert "The sum changes between clipping and noise" in sentence(found, "sum-rebuilt")


def test_a_sum_of_rows_that_are_not_clipped_is_too_long(diagnosed, monkeypatch):
    def loop(made):
        each(made, lambda inputs, targets: (100 * inputs, targets))

    assert not names(diagnosed(loop)) & CERTAIN
    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", without_clipping)
    assert "sum-norm" in names(diagnosed(loop))


def test_several_draws_for_one_step_are_found_as_duplicates(diagnosed):
    def loop(made):
        batches = forever(made.loader)
        each(made, lambda *batch: [torch.cat(pair) for pair in zip(batch, next(batches), strict=True)])

    found = diagnosed(loop, batch_size=20)
    assert "duplicate-examples" in names(found)
    assert "rows-drawn" not in names(found)
    assert f"{STEPS} of {STEPS} steps use several draws of the sampler." in found.notes


def weighted(made):
    chosen = WeightedRandomSampler(torch.linspace(0.05, 1, 200), 200)
    return DataLoader(made.loader.dataset, batch_sampler=BatchSampler(chosen, 20, drop_last=False))


def same_order(made):
    return DataLoader(made.loader.dataset, batch_size=20)


def shuffled(made):
    return DataLoader(made.loader.dataset, batch_size=20, shuffle=True)


SAMPLERS = {weighted: "duplicate-examples", same_order: "repeated-batches", shuffled: "participation-counts"}


@pytest.mark.few(2)
@pytest.mark.parametrize("loader", SAMPLERS, ids=lambda loader: loader.__name__)
def test_other_sampling_than_poisson_is_found_without_sampling_true(private, loader):
    made = private(noise_multiplier=1.0, batch_size=20, poisson_sampling=False)
    made.loader = loader(made)
    known = {"sample_rate": 0.1, "delta": DELTA, "num_canaries": 16, "seed": 0}
    with observe(made.optimizer, loader=made.loader, **known) as recorder:
        run(made, 100)
    found = names(recorder.diagnose())
    assert SAMPLERS[loader] in found
    assert not found & CERTAIN


def test_a_sampler_of_a_subset_is_tested_on_the_subset(private):
    made = private(noise_multiplier=1.0, num_examples=400, poisson_sampling=False)

    class Poisson(SubsetRandomSampler):
        def __iter__(self):
            kept = torch.as_tensor(self.indices)
            yield kept[torch.rand(len(kept)) < 0.1].tolist()

        def __len__(self):
            return 1

    chosen = Poisson(range(1, 400, 2))
    made.loader = DataLoader(made.loader.dataset, batch_sampler=chosen)
    known = {"sample_rate": 0.1, "delta": DELTA, "num_canaries": 16, "seed": 0}
    with observe(made.optimizer, loader=made.loader, **known) as recorder:
        run(made, 100)
    assert not names(recorder.diagnose()) & (CERTAIN | SAMPLING)


def test_the_batches_of_an_audit_of_the_sampling_are_tested_too(private):
    made = private(noise_multiplier=1.0, batch_size=20, poisson_sampling=False, loading={"shuffle": True})
    known = {"num_steps": 100, "delta": DELTA, "seed": 0, "loader": made.loader}
    with observe(made.optimizer, sampling=True, num_canaries=32, **known) as recorder:
        run(made, 100)
    assert "participation-counts" in names(recorder.diagnose())


def test_another_loader_in_the_loop_is_not_mistaken_for_that_of_the_training(diagnosed):
    public = DataLoader(small_data(30), batch_size=3)

    def loop(made):
        for inputs, targets in itertools.islice(forever(made.loader), STEPS):
            with torch.no_grad():
                for other, _ in public:
                    made.model(other)
            train_step(made, inputs, targets)

    found = diagnosed(loop)
    assert not names(found) & (CERTAIN | SAMPLING)
    assert not untested(found)


def test_without_batches_of_a_loader_the_diagnosis_asks_for_them(diagnosed):
    found = diagnosed(observer={"loader": None})
    assert len(untested(found)) == 1
    assert not names(found) & CERTAIN


def test_a_loop_with_batches_of_its_own_can_report_them(private):
    made = private(noise_multiplier=1.0)
    data, rng = made.loader.dataset, torch.Generator().manual_seed(0)
    known = {"sample_rate": 0.05, "delta": DELTA, "num_canaries": 16, "seed": 0}
    for copies, expected in ((1, set()), (2, {"rows-drawn"})):
        with observe(made.optimizer, **known) as recorder:
            for _ in range(STEPS):
                chosen = torch.nonzero(torch.rand(200, generator=rng) < 0.05).reshape(-1)
                recorder.observe_batch(chosen.tolist(), 200)
                train_step(made, *data[chosen.repeat(copies)])
        assert names(recorder.diagnose(noise_multiplier=1.0)) & CERTAIN == expected


def test_everything_is_restored(private):
    made = private(noise_multiplier=1.0, grad_sample_mode="ghost")
    sampler, before = type(made.loader.batch_sampler), (dict(vars(made.optimizer)), dict(vars(made.model)))
    for loader in (made.loader, None):
        with observe(made.optimizer, module=made.model, loader=loader, delta=DELTA):
            run(made, 3)
    assert type(made.loader.batch_sampler) is sampler
    assert set(vars(made.optimizer)) == set(before[0])
    assert set(vars(made.model)) == set(before[1])


def test_wrappers_do_not_make_canaries_slow(private):
    made = private(noise_multiplier=1.0)
    with observe(made.optimizer, loader=made.loader, delta=DELTA):
        assert not PerSampleClip(made.optimizer).needs_full_rows
    made.optimizer.clip_and_accumulate = lambda: without_clipping(made.optimizer)
    with observe(made.optimizer, loader=made.loader, delta=DELTA):
        assert PerSampleClip(made.optimizer).needs_full_rows


def row_norms(optimizer):
    return torch.stack([rows.flatten(1).norm(dim=1) for rows in optimizer.grad_samples]).norm(dim=0)


NORMS = {
    "median": lambda norms, _: norms.median(),
    "largest, at most 8": lambda norms, _: norms.max().clamp(max=8.0),
    "half of the 75 % quantile": lambda norms, _: 0.5 * norms.quantile(0.75),
    "mean of the batch before": lambda _, before: before.mean(),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_clipping_norm_that_is_computed_from_the_batch_is_named(diagnosed, name):
    """The noise follows the norm, so that no test of the noise can see it."""

    last = [torch.ones(1)]

    def set_norm(made, _):
        norms = row_norms(made.optimizer)
        if len(norms):
            made.optimizer.max_grad_norm = float(NORMS[name](norms, last.pop()))
            last.append(norms)

    def loop(made):
        each(made, after_backward=set_norm)

    found = diagnosed(loop)
    assert "The clipping norm is computed from the data" in sentence(found, "clipping-norm")
    assert name.split(",")[0].split(" of the batch")[0].removeprefix("half of the ") in sentence(
        found, "clipping-norm"
    )
    assert found.likely_causes()[0].startswith("is max_grad_norm set to a statistic")
    assert not [note for note in found.notes if "clipping norm changed" in note]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_schedule_of_the_clipping_norm_is_a_note_and_said_not_to_be_tested(diagnosed, mode):
    def loop(made):
        for number, (inputs, targets) in enumerate(itertools.islice(forever(made.loader), STEPS)):
            norm = 0.97**number * (1.0 if number % 2 else 0.9)
            made.optimizer.max_grad_norm = norm
            if made.ghost:
                made.model.max_grad_norm = norm
            train_step(made, inputs, targets)

    found = diagnosed(loop, grad_sample_mode=mode)
    assert not names(found) & (CERTAIN | {"clipping-norm"})
    assert any("The clipping norm changed 39 times, between 0.2829 and 0.97" in one for one in found.notes)
    assert any(text.startswith("the clipping norm changed during the run") for text in found.not_covered)


def scheduled(made, *, is_late, gamma=0.97):
    """A loop of split batches whose clipping norm shrinks, after each logical batch or after each part."""
    scheduler = ExponentialGradClip(made.optimizer, gamma=gamma)
    split = BatchMemoryManager(data_loader=made.loader, max_physical_batch_size=4, optimizer=made.optimizer)
    with split as loader:
        num_left = STEPS // 2
        for inputs, targets in forever(loader):
            train_step(made, inputs, targets)
            is_done = not made.optimizer._is_last_step_skipped
            if is_done or is_late:
                scheduler.step()
                if made.ghost:
                    made.model.max_grad_norm = made.optimizer.max_grad_norm
            num_left -= is_done
            if num_left == 0:
                return


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("seed", range(10))
def test_a_clipping_norm_that_shrinks_within_a_step_is_found(diagnosed, mode, seed):
    found = diagnosed(lambda made: scheduled(made, is_late=True), grad_sample_mode=mode, seed=seed)
    assert "Rows are clipped to a larger norm than that of the noise" in sentence(found, "clipping-norm")
    assert sum(one.name == "clipping-norm" for one in found.findings) == 1


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize(("is_late", "gamma"), [(False, 0.97), (True, 1.03)], ids=["by step", "growing"])
def test_a_clipping_norm_that_shrinks_between_steps_or_grows_is_no_finding(diagnosed, mode, is_late, gamma):
    def loop(made):
        scheduled(made, is_late=is_late, gamma=gamma)

    assert not names(diagnosed(loop, grad_sample_mode=mode)) & (CERTAIN | {"clipping-norm"})


def test_a_backward_pass_before_the_norm_is_lowered_is_no_finding(diagnosed):
    def loop(made):
        inputs, targets = next(iter(made.loader))
        made.criterion(made.model(inputs), targets).backward()
        made.optimizer.max_grad_norm = made.model.max_grad_norm = 0.5
        run(made, STEPS)

    assert "clipping-norm" not in names(diagnosed(loop, grad_sample_mode="ghost"))


@pytest.mark.parametrize("kind", ["flat", "adaptive clipping"])
def test_a_constant_or_adaptive_clipping_norm_is_not_mentioned(diagnosed, kind):
    found = diagnosed(**MODES[kind])
    assert not [text for text in (*found.notes, *found.not_covered) if "clipping norm" in text]


@pytest.mark.parametrize("shorter", [0, 2])
def test_rows_that_are_scaled_to_a_scheduled_norm_do_not_look_like_a_norm_from_the_data(shorter):
    norms = ClippingNorms(None)
    for number in range(STEPS):
        rows = torch.full((7,), 0.9**number)
        rows[:shorter] *= 0.3
        norms.note(0.9**number, rows)
    assert norms.results(ClaimedStep(noise_multiplier=1.0)).certain == ()


def test_a_slow_schedule_and_norms_that_repeat_do_not_look_like_a_norm_from_the_data():
    """With whole numbers as features and an absolute loss, norms are on a lattice, and so is their median."""
    norms, rng = ClippingNorms(None), np.random.default_rng(0)
    for number in range(300):
        norm = 0.75 + 0.25 * math.cos(2 * math.pi * number / 10_000)
        norms.note(norm, torch.from_numpy(rng.geometric(0.3, 200) ** 1.5))
    assert norms.results(ClaimedStep(noise_multiplier=1.0)).certain == ()


def added_after_the_pass(term):
    """A ghost loop with a second backward pass that is not private."""

    def add(made, inputs):
        made.model.disable_hooks()
        term(made.model._module, inputs).backward()
        made.model.enable_hooks()

    return lambda made: each(made, after_backward=add)


def test_a_plain_backward_pass_after_the_private_one_is_named(diagnosed):
    loop = added_after_the_pass(lambda model, inputs: 0.3 * (model(inputs) ** 2).mean())
    found = diagnosed(loop, grad_sample_mode="ghost")
    assert "The sum changes between clipping and noise in 39 of 40 steps" in sentence(found, "sum-rebuilt")


@pytest.mark.parametrize("power", [1, 2], ids=["L1", "L2"])
def test_a_penalty_of_the_weights_after_the_private_pass_is_no_finding(diagnosed, power):
    loop = added_after_the_pass(
        lambda model, _: 0.01 * sum((value.abs() ** power).sum() for value in model.parameters())
    )
    assert not names(diagnosed(loop, grad_sample_mode="ghost")) & CERTAIN


@pytest.mark.parametrize("limit", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_sum_that_is_limited_again_after_the_private_pass_is_a_note(diagnosed, limit):
    def loop(made):
        each(made, after_backward=lambda made, _: limit(made.model.parameters(), 0.1))

    found = diagnosed(loop, grad_sample_mode="ghost")
    assert not names(found) & CERTAIN
    assert any("The sum is scaled down between clipping and noise" in note for note in found.notes)


def test_coefficients_that_are_computed_without_the_norms_of_the_model_are_no_bypass(diagnosed):
    def change(made):
        def coefficients():
            norms = torch.stack([value._norm_sample for value in made.model.trainable_parameters])
            return 1.0 / (norms.norm(dim=0) + 0.01)

        made.model.get_clipping_coef = coefficients

    assert not names(diagnosed(change=change, grad_sample_mode="ghost")) & CERTAIN


@pytest.mark.parametrize("unit", [2, 4])
def test_batches_that_are_cut_to_a_multiple_are_named(diagnosed, unit):
    def cut(inputs, targets):
        size = len(targets) // unit * unit
        return inputs[:size], targets[:size]

    found = diagnosed(lambda made: each(made, cut, num_steps=80), num_steps=80)
    assert "Rows are left out in" in sentence(found, "rows-drawn")
    assert "cut to a size" in found.likely_causes()[0]


def test_rows_that_are_left_out_of_every_full_batch_are_not_called_cut(diagnosed, private):
    number = len(private(noise_multiplier=1.0).loader.dataset)

    def drop(inputs, targets):
        kept = inputs[:, 1] > -1
        return inputs[kept], targets[kept]

    options = {"poisson_sampling": False, "batch_size": number}
    found = diagnosed(lambda made: each(made, drop, num_steps=40), num_steps=40, **options)
    assert "rows-drawn" not in names(found)

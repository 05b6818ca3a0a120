"""Canaries that are entries of the data set: the loader's own sampler is audited with everything else."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_runs import DELTA, run, train_step, weights, without_clipping
from statistical_limits import count_range, least_caught, most_flagged, room, spread_range
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler

import dpaudit
from dpaudit.observers.opacus import observe
from dpaudit.observers.opacus._sampling import SamplerWithCanaries

VIOLATION, NO_VIOLATION = dpaudit.Verdict.VIOLATION, dpaudit.Verdict.NO_VIOLATION
STEPS, EXAMPLES, BATCH = 100, 250, 10  # one setting: the curve of the whole training is found once


def wide(hidden=185):
    return nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 2))


@pytest.fixture
def made(private):
    """A training at sample rate 1/25 with noise 0.5, of a model with 2,037 parameters."""

    def build(*, seed=0, loading=None, **options):
        usual = {"noise_multiplier": 0.5, "num_examples": EXAMPLES, "batch_size": BATCH, "build": wide}
        return private(seed=seed, loading={"shuffle": True} | (loading or {}), **(usual | options))

    return build


@pytest.fixture
def sampled(made):
    """Train and audit."""

    def go(*, seed=0, num_steps=STEPS, observer=None, spoil=None, **options):
        built = made(seed=seed, **options)
        if spoil is not None:
            spoil(built)
        module = {"module": built.model} if built.ghost else {}
        options = {"loader": built.loader, "delta": DELTA, "seed": seed, **module, **(observer or {})}
        with observe(built.optimizer, sampling=True, **options) as built.recorder:
            run(built, num_steps)
        return built

    return go


def own_chance(seed=0):
    """Generators of their own for batches and for noise, so that neither is moved by the other."""
    return {
        "loading": {"generator": torch.Generator().manual_seed(seed)},
        "noise_generator": torch.Generator().manual_seed(seed + 1),
    }


def scores(recorder):
    return np.concatenate([recorder.observations.with_canary, recorder.observations.without_canary])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.long
def test_shuffled_batches_are_a_violation_of_the_poisson_sampling_that_is_accounted(sampled, seed):
    built = sampled(
        seed=seed, poisson_sampling=False, build=lambda: wide(850), observer={"num_canaries": 9000}
    )
    result = built.recorder.audit()
    assert result.claim.summary.startswith("DP-SGD, noise multiplier 0.5, sample rate 0.04, 100 steps")
    assert result.verdict is VIOLATION


@pytest.mark.long
def test_correct_sampling_is_not_flagged_and_the_bound_is_near_the_claim(sampled):
    results = [sampled(seed=seed).recorder.audit() for seed in range(8)]
    flagged = sum(result.verdict is VIOLATION for result in results)
    assert flagged <= most_flagged(8, broken=0.9)
    tight = sum(result.bound.epsilon > 0.8 * result.claim.epsilon for result in results)
    assert tight >= least_caught(8, 0.95, broken=0.1)


def more_often(built):
    built.loader.batch_sampler.sample_rate *= 1.5


def half_the_noise(built):
    add_noise = built.optimizer.add_noise

    def quiet():
        claimed, built.optimizer.noise_multiplier = built.optimizer.noise_multiplier, 0.25
        add_noise()
        built.optimizer.noise_multiplier = claimed

    built.optimizer.add_noise = quiet


@pytest.mark.long
def test_a_larger_sample_rate_than_accounted_is_a_violation(sampled):
    result = sampled(spoil=more_often).recorder.audit()
    assert "sample rate 0.04" in result.claim.summary
    assert result.verdict is VIOLATION


@pytest.mark.long
def test_noise_that_is_too_small_is_a_violation_at_a_threshold_that_is_looked_for(sampled):
    result = sampled(spoil=half_the_noise).recorder.audit(threshold=dpaudit.HeldOut(0.2))
    assert result.verdict is VIOLATION


@pytest.mark.long
def test_gradients_that_are_not_clipped_are_a_violation(sampled, monkeypatch):
    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", without_clipping)
    assert sampled().recorder.audit().verdict is VIOLATION


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"grad_sample_mode": "ghost"},
        {"clipping": "per_layer", "max_grad_norm": [0.6, 0.01, 0.01, 0.01]},
        {"optimizer": lambda found: torch.optim.Adam(found, lr=0.01)},
        {"num_examples": 25, "batch_size": 1},  # a third of the batches is empty
        {"num_examples": 25, "batch_size": 1, "poisson_sampling": False},
    ],
    ids=["ghost", "per layer", "adam", "empty batches", "empty shuffled batches"],
)
def test_canaries_are_drawn_at_the_sample_rate_and_score_1_whatever_the_training_is(sampled, options):
    recorder = sampled(num_steps=50, **options).recorder
    joined, absent = recorder.scorer.drawn, recorder.scorer.absent
    fewest, most = count_range(50 * recorder.scorer.present.sum(), 1 / 25, comparisons=4)
    assert fewest <= joined.count <= most
    assert joined.mean == pytest.approx(1.0, abs=room(0.5 / joined.count**0.5, comparisons=4))
    assert absent.mean == pytest.approx(0.0, abs=room(0.5 / absent.count**0.5, comparisons=4))
    low, high = spread_range(absent.count, comparisons=4)
    assert 0.5 * low < (absent.error * absent.count) ** 0.5 < 0.5 * high


def test_by_default_half_of_the_canaries_one_per_two_parameters_are_entries(sampled):
    recorder = sampled(num_steps=1).recorder
    assert recorder.scorer.present.size == 1018
    fewest, most = count_range(1018, 0.5)
    assert fewest <= recorder.scorer.present.sum() <= most


class Noting:
    """Keeps the batches of a loader, which are batches of the loader also inside of a context."""

    def __init__(self, loader):
        self.loader, self.batches = loader, []

    def __iter__(self):
        for batch in self.loader:
            self.batches.append(batch)
            yield batch


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_the_weights_are_those_of_the_same_batches_without_canaries(made, poisson_sampling):
    observed, plain = (made(poisson_sampling=poisson_sampling, **own_chance()) for _ in range(2))
    noting = Noting(observed.loader)
    with observe(observed.optimizer, loader=observed.loader, sampling=True, seed=0):
        run(observed, 50, noting)
    run(plain, 50, noting.batches)
    torch.testing.assert_close(weights(observed.model), weights(plain.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_batches_hold_examples_of_the_data_set_as_often_as_before(made, poisson_sampling):
    built = made(poisson_sampling=poisson_sampling)
    noting = Noting(built.loader)
    with observe(built.optimizer, loader=built.loader, sampling=True, seed=0):
        run(built, STEPS, noting)
    inputs, targets = (torch.cat(parts) for parts in zip(*noting.batches, strict=True))
    known = built.loader.dataset.tensors[0]
    times = torch.tensor([int((inputs == row).all(1).sum()) for row in known])
    torch.testing.assert_close(targets, (inputs[:, 0] > 0).long())
    if poisson_sampling:
        fewest, most = count_range(STEPS * EXAMPLES, 1 / 25)
        assert fewest <= times.sum() <= most
        assert times.max() > 4
    else:
        assert (times == 4).all()  # once an epoch


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_nobody_sees_another_sampler_and_everything_is_put_back_also_if_the_loop_raises(
    made, poisson_sampling
):
    built = made(poisson_sampling=poisson_sampling)
    sampler = built.loader.batch_sampler

    def seen():
        inner = getattr(sampler, "sampler", sampler)
        return dict(vars(sampler)), dict(vars(inner)), len(built.loader), built.optimizer.expected_batch_size

    before, kind, collate = seen(), type(sampler), built.loader.collate_fn

    def fail():
        for place, (inputs, targets) in enumerate(built.loader):
            built.criterion(built.model(inputs), targets).backward()
            built.optimizer.step()
            built.optimizer.zero_grad()
            assert seen() == before
            assert isinstance(sampler, kind)
            if place == 3:
                raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        observe(built.optimizer, loader=built.loader, sampling=True) as recorder,
    ):
        fail()
    assert recorder.num_done == 4
    assert seen() == before
    assert type(sampler) is kind
    assert built.loader.collate_fn is collate
    run(built, 3)
    assert recorder.num_done == 4


@pytest.mark.few(3)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("examples", [99, 100, 101, 119])
def test_shuffled_batches_stay_as_many_and_draw_as_large_a_share(made, examples, drop_last):
    built = made(
        num_examples=examples, batch_size=20, poisson_sampling=False, loading={"drop_last": drop_last}
    )
    with observe(built.optimizer, loader=built.loader, sampling=True, seed=0) as recorder:
        for inputs, targets in built.loader:
            train_step(built, inputs, targets)
    assert recorder.num_done == len(built.loader)
    used = recorder.num_done * 20 / examples
    if used < 1:  # nearly all, so that too many could not be told
        assert (
            least_caught(recorder.scorer.present.sum(), used, broken=used / 2) <= recorder.scorer.drawn.count
        )
        assert recorder.scorer.drawn.count <= recorder.scorer.present.sum()
    else:
        assert recorder.scorer.drawn.count == recorder.scorer.present.sum()


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("examples", "batch"), [(50_000, 64), (60_000, 128), (10_000, 32), (250, 10)])
def test_batches_of_any_size_can_be_enlarged(examples, batch, drop_last):
    data = range(examples)
    plain = BatchSampler(RandomSampler(data), batch, drop_last)
    for more in (1, 17, 4096):
        enlarged = SamplerWithCanaries.of(plain, more)
        sizes = [len(drawn) for drawn in enlarged.batches(lambda: iter(plain), nullcontext)]
        shares = np.array(sizes) / (examples + more)
        before = np.array([len(drawn) for drawn in plain]) / examples
        np.testing.assert_allclose(shares, before, atol=1 / (examples + more))
        assert np.sum(shares) == pytest.approx(np.sum(before), abs=1 / examples)
        assert (plain.batch_size, plain.drop_last) == (batch, drop_last)


def test_a_step_of_two_batches_that_is_accounted_as_one_is_a_violation(made):
    built = made()
    with observe(built.optimizer, loader=built.loader, sampling=True, seed=1, delta=DELTA) as recorder:
        for place, batch in enumerate(itertools.chain(*[built.loader] * 8)):
            built.optimizer.signal_skip_step(do_skip=place % 2 == 0)
            train_step(built, *batch)
    fewest, most = count_range(recorder.num_done * recorder.scorer.present.sum(), 1 - 0.96**2)
    assert fewest <= recorder.scorer.drawn.count <= most
    result = recorder.audit()
    assert "sample rate 0.04, 100 steps" in result.claim.summary
    assert result.verdict is VIOLATION


def test_a_loop_that_leaves_out_empty_batches_is_audited_up_to_the_first(made):
    built = made(num_examples=25, batch_size=1)

    def loop():
        for inputs, targets in itertools.chain(*[built.loader] * 8):
            if len(inputs):
                train_step(built, inputs, targets)

    with (
        observe(built.optimizer, loader=built.loader, sampling=True, seed=1, delta=DELTA) as recorder,
        pytest.warns(match="The audit ends: .* every batch in a step, including empty ones"),
    ):
        loop()
    result = recorder.audit()
    assert f"{recorder.num_done} steps" in result.claim.summary
    assert result.not_covered[0].startswith(f"steps from step {recorder.num_done} on are not audited")


def without_the_last_five(built, *, epochs, broken_off=False):
    for _ in range(epochs):
        for place, batch in enumerate(built.loader):
            if place < 20:
                train_step(built, *batch)
            elif broken_off:
                break


def test_batches_without_a_step_end_the_audit_unless_the_loop_was_broken_off(made):
    built = made()
    options = {"loader": built.loader, "sampling": True, "seed": 1, "delta": DELTA}
    with observe(built.optimizer, **options) as recorder:
        without_the_last_five(built, epochs=1)
    for judge in (recorder.audit, recorder.one_run_bound):
        with pytest.raises(dpaudit.InputError, match="did not use 5 batches"):
            judge()
    with (
        observe(built.optimizer, **options) as recorder,
        pytest.warns(match="steps from step 20 on are not audited: The loop did not use 5 batches"),
    ):
        without_the_last_five(built, epochs=2)
    assert "20 steps" in recorder.audit().claim.summary
    with observe(built.optimizer, **options) as recorder:
        without_the_last_five(built, epochs=5, broken_off=True)
    assert recorder.audit().verdict is NO_VIOLATION


class Fixed(Sampler):
    """Batches of one size, from as many entries as it says, or as it said when it was made."""

    def __init__(self, *, late):
        self.num_samples, self.late, self.chance = EXAMPLES, late, np.random.default_rng(0)
        self.known = EXAMPLES

    def __len__(self):
        return EXAMPLES // BATCH

    def __iter__(self):
        for _ in range(len(self)):
            entries = self.num_samples if self.late else self.known
            yield self.chance.choice(entries, BATCH, replace=False).tolist()


def test_a_sampler_that_keeps_to_the_entries_of_before_gets_no_verdict(made):
    built = made()
    loader = DataLoader(built.loader.dataset, batch_sampler=Fixed(late=False))
    with (
        observe(built.optimizer, loader=loader, sampling=True, seed=3, delta=DELTA) as recorder,
        pytest.warns(match="drew only from the first 250 of 747 entries in an epoch"),
    ):
        run(built, STEPS, loader)
    with pytest.raises(dpaudit.InputError, match="drew only from the first 250 of 747"):
        recorder.audit()


def test_a_sampler_whose_batches_do_not_grow_gets_no_verdict(made):
    built = made()
    loader = DataLoader(built.loader.dataset, batch_sampler=Fixed(late=True))
    with observe(built.optimizer, loader=loader, sampling=True, seed=3, delta=DELTA) as recorder:
        run(built, STEPS, loader)
    with pytest.raises(
        dpaudit.InputError, match="The Fixed drew canaries 672 times, instead of about 1988: its batches do"
    ):
        recorder.audit()


class Permuted(Sampler):
    """An epoch of examples; says that there are more of them if it is told so, but has no others."""

    def __init__(self):
        self.num_samples = EXAMPLES

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        return iter(torch.randperm(EXAMPLES).tolist())


def test_an_epoch_that_is_shorter_than_it_says_gets_no_verdict(made):
    built = made()
    loader = DataLoader(built.loader.dataset, batch_size=BATCH, sampler=Permuted())
    with (
        observe(built.optimizer, loader=loader, sampling=True, seed=3, delta=DELTA) as recorder,
        pytest.warns(match="it draws from another number of entries than it states"),
    ):
        run(built, STEPS, loader)
    with pytest.raises(dpaudit.InputError, match="another number of entries than it states"):
        recorder.audit()


def test_the_first_batch_may_be_empty(made):
    empty = 0
    for seed in range(4):
        built = made(seed=seed, num_examples=25, batch_size=1, poisson_sampling=False)
        noting = Noting(built.loader)
        with observe(built.optimizer, loader=built.loader, sampling=True, seed=seed):
            run(built, 2, noting)
        inputs, targets = noting.batches[0]
        assert (inputs.shape[1:], inputs.dtype, targets.dtype) == ((8,), torch.float32, torch.int64)
        empty += len(inputs) == 0
    assert empty > 0


@pytest.mark.parametrize("sampling", [True, False])
def test_an_optimizer_or_a_loader_is_not_observed_twice(made, sampling):
    built, other = made(), made()
    options = {"loader": built.loader, "sampling": sampling}
    with observe(built.optimizer, **options):
        with (
            pytest.raises(dpaudit.InputError, match="The optimizer already has another observer"),
            observe(built.optimizer, **options),
        ):
            pass
        if sampling:
            with (
                pytest.raises(dpaudit.InputError, match="The loader already has another observer"),
                observe(other.optimizer, **options),
            ):
                pass
    with observe(built.optimizer, **options):
        pass


class Rigid(Fixed):
    """Does not become an object of another class."""

    def __setattr__(self, name, value):
        if name == "__class__":
            raise TypeError(name)
        super().__setattr__(name, value)


def test_an_observer_that_cannot_begin_leaves_everything_as_it_was(made):
    built = made()
    loader = DataLoader(built.loader.dataset, batch_sampler=Rigid(late=True))
    before, collate = dict(vars(built.optimizer)), loader.collate_fn
    with pytest.raises(TypeError), observe(built.optimizer, loader=loader, sampling=True):
        pass
    assert vars(built.optimizer) == before
    assert not built.optimizer.original_optimizer._optimizer_step_pre_hooks
    assert loader.collate_fn is collate


def per_layer(*norms):
    return {"clipping": "per_layer", "max_grad_norm": list(norms)}  # 1480, 185, 370 and 2 parameters


@pytest.mark.parametrize(
    ("norms", "count", "reach"),
    [
        ((0.5, 0.5, 0.5, 0.5), 92, 0.75**0.5),
        ((0.7, 0.1, 0.7, 0.1), 185, (0.98 / 1.0) ** 0.5),
        ((1.0, 0.01, 0.01, 0.01), 740, 1.0),
    ],
)
def test_so_many_canaries_that_most_of_the_norm_of_layers_is_theirs(sampled, norms, count, reach):
    recorder = sampled(num_steps=50, **per_layer(*norms)).recorder
    assert recorder.scorer.present.size == count
    spread = (recorder.scorer.absent.error * recorder.scorer.absent.count) ** 0.5
    low, high = spread_range(recorder.scorer.absent.count)
    assert low < spread * reach / 0.5 < high
    assert recorder.scorer.noise == pytest.approx(0.5 / reach, rel=0.01)
    assert [f"reach only {100 * reach:.0f} %" in said for said in recorder.not_covered] == [True] * (
        reach < 0.99
    )


@pytest.mark.parametrize(
    "options",
    [per_layer(0.5, 0.5, 0.5, 0.9), per_layer(0.5, 0.5, 0.5, 0.5) | {"observer": {"num_canaries": 370}}],
    ids=["by default", "as told"],
)
def test_canaries_that_leave_out_much_of_the_norm_are_refused(sampled, options):
    with pytest.raises(
        dpaudit.InputError, match=r"Canaries reach only layers with .* % of the clipping norm with"
    ):
        sampled(num_steps=1, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["manager first", "observer first"])
def test_batches_that_a_memory_manager_splits_are_one_step_with_the_same_canaries(made, order):
    found = []
    for split in (False, True):
        built = made(**own_chance())
        manager = BatchMemoryManager(
            data_loader=built.loader, max_physical_batch_size=4, optimizer=built.optimizer
        )
        outer, inner = nullcontext(built.loader), nullcontext()
        if split:
            outer, inner = (manager, inner) if order == "manager first" else (outer, manager)
        with (
            outer as given,
            observe(built.optimizer, loader=given, sampling=True, seed=0) as recorder,
            inner as used,
        ):
            run(built, 30, used or given)
        assert recorder.num_done == 30
        found.append(scores(recorder))
    np.testing.assert_allclose(*found, atol=1e-3)


def test_processes_that_load_examples_ahead_change_nothing(made):
    found = []
    for workers in (0, 2):
        chance = own_chance()
        built = made(**chance | {"loading": chance["loading"] | {"num_workers": workers}})
        with observe(built.optimizer, loader=built.loader, sampling=True, seed=0) as recorder:
            run(built, 30)
        found.append(scores(recorder))
    np.testing.assert_allclose(*found, atol=1e-3)


def test_canaries_of_all_batches_that_a_step_accumulates_join_it(made):
    built = made(poisson_sampling=False)
    with observe(built.optimizer, loader=built.loader, sampling=True, seed=0, delta=DELTA) as recorder:
        for place, (inputs, targets) in enumerate(built.loader):
            built.criterion(built.model(inputs), targets).backward()
            if place % 2:
                built.optimizer.step()
                built.optimizer.zero_grad()
    assert recorder.num_done == 12
    fewest, most = count_range(recorder.scorer.present.sum(), 24 / 25)
    assert fewest <= recorder.scorer.drawn.count <= most
    assert "sample rate 0.08" in recorder.claim.summary


def test_a_canary_that_is_drawn_twice_for_a_step_joins_it_twice(made):
    built = made(poisson_sampling=False)
    data = built.loader.dataset
    twice = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, replacement=True), 125, False))
    with observe(built.optimizer, loader=twice, sampling=True, seed=0) as recorder:
        run(built, 2, twice)
    allowed = room(recorder.scorer.drawn.error**0.5)
    assert recorder.scorer.drawn.mean == pytest.approx(0.5 / (1 - np.exp(-0.5)), abs=allowed)


def test_every_part_of_the_claim_can_be_given(sampled):
    recorder = sampled(observer={"delta": None}).recorder
    with pytest.raises(dpaudit.InputError, match="delta is missing"):
        recorder.audit()
    other = recorder.audit(delta=1e-6, noise_multiplier=0.6)
    assert "noise multiplier 0.6, sample rate 0.04, 100 steps" in other.claim.summary
    assert other.verdict is VIOLATION
    assert recorder.audit(delta=1e-6).verdict is NO_VIOLATION


@pytest.mark.long
def test_a_bound_without_independent_canaries_is_looser(sampled):
    recorder = sampled(observer={"delta": None}).recorder
    assert 0 < recorder.one_run_bound(delta=DELTA).epsilon < recorder.audit(delta=DELTA).bound.epsilon


def test_a_run_that_is_not_finished_is_not_judged(sampled):
    recorder = sampled(num_steps=10, observer={"num_steps": 11}).recorder
    with pytest.raises(
        dpaudit.InputError, match="The whole run can be audited only after all 11 steps, got 10"
    ):
        recorder.audit()
    with pytest.raises(dpaudit.InputError, match=r"[Tt]here is no bound"):
        recorder.live()


def never(built):
    built.loader.batch_sampler.sample_rate = 0.0


def test_a_sampler_that_never_draws_canaries_gets_no_verdict(sampled):
    recorder = sampled(spoil=never, num_steps=10).recorder
    with pytest.raises(
        dpaudit.InputError,
        match="The sampler drew no canary, instead of about 207: it does not draw from all",
    ):
        recorder.audit()


def test_a_loop_over_another_loader_is_refused(made):
    built, other = made(), made()
    with (
        pytest.raises(dpaudit.InputError, match="No batch of the loader was drawn before step 0"),
        observe(built.optimizer, loader=built.loader, sampling=True),
    ):
        run(built, 1, other.loader)


def one_by_one(built):
    return {"loader": DataLoader(built.loader.dataset, batch_size=None)}


def listed(built):
    return {"loader": DataLoader(built.loader.dataset, batch_sampler=[[0, 1], [2, 3]])}


class Doubled(BatchSampler):
    """Makes more batches than it would if it were none of its own."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


def cut_by_itself(built):
    data = built.loader.dataset
    return {"loader": DataLoader(data, batch_sampler=Doubled(RandomSampler(data), 10, False))}


class Endless(Sampler):
    def __init__(self):
        self.num_samples = EXAMPLES

    def __iter__(self):
        while True:
            yield [0]


def without_length(built):
    return {"loader": DataLoader(built.loader.dataset, batch_sampler=Endless())}


def weighted(built):
    sampler = WeightedRandomSampler(torch.ones(EXAMPLES), EXAMPLES)
    return {"loader": DataLoader(built.loader.dataset, batch_size=10, sampler=sampler)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (lambda _: {"loader": None}, "needs loader=.* got NoneType"),
        (one_by_one, "the loader that make_private returned"),
        (weighted, "A WeightedRandomSampler does not state its number of entries in num_samples"),
        (listed, "A list does not state its number of entries in num_samples or data_source,"),
        (cut_by_itself, "A Doubled does not state its number of entries in num_samples or"),
        (without_length, "A Endless has no length; without it, there is no way to check that canaries"),
        (
            lambda _: {"callbacks": [print]},
            "callbacks cannot be used with sampling=True: there is no bound before the",
        ),
        (
            lambda _: {"every": 10},
            "every cannot be used with sampling=True: there is no bound before the last",
        ),
        (
            lambda _: {"num_canaries": 31},
            "num_canaries must be at least 32 in an audit of the whole run, got 31: each",
        ),
        (
            lambda _: {"num_canaries": 3000},
            "num_canaries must be at most 2037, the number of model parameters, got",
        ),
        (
            lambda _: {"noise_multiplier": 0.0},
            "noise_multiplier must be positive, got 0: without noise there is no claim",
        ),
    ],
)
def test_what_cannot_be_gets_a_sentence(made, options, sentence):
    built = made()
    with (
        pytest.raises(dpaudit.InputError, match=sentence),
        observe(built.optimizer, sampling=True, **{"loader": built.loader} | options(built)),
    ):
        pass


def test_a_rate_that_nobody_knows_is_asked_for(made):
    built = made(poisson_sampling=False)
    built.optimizer.attach_step_hook(lambda _: None)
    options = {"loader": built.loader, "sampling": True}
    with (
        pytest.raises(dpaudit.InputError, match="The claim assumes Poisson sampling"),
        observe(built.optimizer, **options),
    ):
        pass
    with observe(built.optimizer, sample_rate=0.04, delta=DELTA, **options) as recorder:
        run(built, 2)
    assert "sample rate 0.04" in recorder.claim.summary

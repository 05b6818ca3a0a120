"""Recorders of observers keep the noise that a library added, and nothing else; its faults are found."""

import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import optax
import pytest
import torch
from jax_runs import loop
from jax_runs import private as private_in_jax
from opacus.optimizers import DPOptimizer, adaclipoptimizer, optimizer_fast_gradient_clipping
from opacus.optimizers import optimizer as flat_optimizer
from opacus_runs import OTHER_KINDS, run
from statistical_limits import LEVEL
from torch import nn

import dpaudit
from dpaudit.diagnostics import ClaimedStep, CoordinateSample, Diagnosis, NoiseCheck, ObservedStep
from dpaudit.observers import jax_privacy, opacus
from dpaudit.observers.jax_privacy._step_callbacks import flat
from dpaudit.recording import DPSGDParams, PerStep, ReadClaim, Recorder

NOISE, NORM = 0.8, 2.0
TERMS = {"sample_rate": 0.05, "num_steps": 120, "delta": 1e-5}
jax_is_new = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


class Optimizer(DPOptimizer):
    """Keeps the noise that it adds."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.added = []

    def add_noise(self):
        sums = torch.cat([value.summed_grad.reshape(-1) for value in self.params])
        super().add_noise()
        self.added.append(torch.cat([value.grad.reshape(-1) for value in self.params]) - sums)


class Unclipped(Optimizer):
    def clip_and_accumulate(self):
        for value in self.params:
            rows = value.grad_sample.sum(0)
            value.summed_grad = rows if value.summed_grad is None else value.summed_grad + rows


class Periodic(Optimizer):
    def add_noise(self):
        self.generator.manual_seed(len(self.added) % 50)
        super().add_noise()


class SameForAll(DPOptimizer):
    def add_noise(self):
        seed = int(torch.randint(2**31, (1,), generator=self.generator))
        for value in self.params:
            own = torch.Generator().manual_seed(seed)
            std = self.noise_multiplier * self.max_grad_norm
            value.grad = value.summed_grad + std * torch.randn(value.shape, generator=own)


class Changed(Optimizer):
    """Adds noise that a method changes."""

    def changed(self, noise):
        return noise

    def add_noise(self):
        sums = [value.summed_grad.clone() for value in self.params]
        super().add_noise()
        for value, total in zip(self.params, sums, strict=True):
            value.grad = total + self.changed(value.grad - total)


class Half(Changed):
    def changed(self, noise):
        return noise.half().float()


class Clamped(Changed):
    def changed(self, noise):
        return noise.clamp(-3 * NOISE * NORM, 3 * NOISE * NORM)


class ByBatch(Changed):
    def changed(self, noise):
        return noise * (len(self.params[0].grad_sample) / 8) ** 0.5


class ByLongest(Changed):
    def changed(self, noise):
        norms = torch.cat([value.grad_sample.flatten(1) for value in self.params], dim=1).norm(dim=1)
        return noise * float(norms.max() / 23.3 - 0.5) * 2


class OneStream(Changed):
    """The last weights have the noise of the first."""

    def changed(self, noise):
        if noise.dim() == 2:
            vector = noise.view(-1)
            vector[-200:] = vector[3:203].clone()
        return noise


class LeftOver(Optimizer):
    def add_noise(self):
        last, self.last = getattr(self, "last", None), [value.summed_grad.clone() for value in self.params]
        super().add_noise()
        for value, total in zip(self.params, last or [], strict=False):
            value.grad += 0.5 * total


class ReversedLong(Optimizer):
    """Adds what is longer than the clipping norm at -1/8 of it, and everything else as it is."""

    def clip_and_accumulate(self):
        norms = torch.cat([rows.flatten(1) for rows in self.grad_samples], dim=1).norm(dim=1)
        factors = torch.where(norms <= 1.001 * self.max_grad_norm, 1.0, -self.max_grad_norm / (8 * norms))
        for value, rows in zip(self.params, self.grad_samples, strict=True):
            total = torch.einsum("i,i...", factors, rows)
            value.summed_grad = total if value.summed_grad is None else value.summed_grad + total


class AddedGradient(Optimizer):
    """Adds a part of the gradient of the batch after the noise; it contains no canary."""

    def add_noise(self):
        super().add_noise()
        for value in self.params:
            value.grad += 0.02 * value.grad_sample.sum(0)


def observed(kind, num_steps=120, seed=0, *, is_planned=True, **options):
    """A recorder of steps of an optimizer that gets gradients of random numbers."""
    terms = TERMS if is_planned else {**TERMS, "num_steps": None}
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(16, 32)
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    made = kind(
        inside, noise_multiplier=NOISE, max_grad_norm=NORM, expected_batch_size=8, generator=generator
    )
    with opacus.observe(made, seed=seed, **(terms | options)) as recorder:
        for _ in range(num_steps):
            size = int(torch.randint(4, 13, (), generator=generator))
            for value in model.parameters():
                value.grad_sample = torch.randn(size, *value.shape, generator=generator)
            made.step()
            made.zero_grad()
    return made, recorder


@pytest.mark.parametrize("kind", [Optimizer, Unclipped])
@pytest.mark.parametrize("canary", [dpaudit.Dirac(), dpaudit.Constant()])
def test_what_is_kept_of_opacus_is_the_noise_whatever_the_clipping_does(kind, canary):
    optimizer, recorder = observed(kind, num_steps=20, canary=canary)
    added = torch.stack(optimizer.added).numpy()
    np.testing.assert_allclose(recorder._tests.noise.record().rows * NORM, added, atol=1e-4)


def test_a_correct_training_has_no_findings():
    for seed in range(5):
        diagnosis = observed(Optimizer, seed=seed)[1].diagnose(confidence=1 - LEVEL / 10)
        assert diagnosis.findings == ()
        assert diagnosis.noise.low < 1 < diagnosis.noise.high


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "expected"), [(Periodic, "repeats every 50 steps"), (SameForAll, "The noise of leaves 0 and 1")]
)
def test_chance_that_is_used_twice_is_found_where_no_score_shows_it(kind, expected):
    recorder = observed(kind)[1]
    result = recorder.audit()
    assert result.verdict is dpaudit.Verdict.VIOLATION
    assert result.refuted == ("mechanism",)
    assert expected in result.findings[0].sentence


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Changed, None),
        (Half, "tied-noise"),
        (Clamped, "missing-tail"),
        (ByBatch, "noise-by-batch"),
        (ByLongest, "noise-by-batch"),
        (OneStream, "shifted-noise"),
        (LeftOver, "noise-by-sum"),
        (AddedGradient, "noise-by-sum"),
    ],
)
def test_noise_that_no_score_shows_to_be_wrong_is_found_in_opacus(kind, expected):
    found = [finding.name for finding in observed(kind)[1].diagnose(confidence=1 - LEVEL).findings]
    assert found[:1] == ([] if expected is None else [expected])


def test_there_is_no_verdict_if_only_canaries_arrive_that_do_not_count():
    recorder = observed(ReversedLong, num_steps=400, is_planned=False)[1]
    with pytest.raises(
        dpaudit.InputError, match="Scores must increase by 1 where a canary is present, but they increase by"
    ):
        recorder.audit()


@pytest.mark.parametrize("tests", [True, False])
def test_an_observed_run_grows_by_its_scores_and_little_more(tests):
    sizes, first, last = {}, 40, 140
    model = nn.Linear(64, 16)
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    made = DPOptimizer(inside, noise_multiplier=NOISE, max_grad_norm=NORM, expected_batch_size=4)
    rows = [torch.randn(4, *value.shape) for value in model.parameters()]
    terms = TERMS | {"num_steps": None}
    tracemalloc.start()
    with opacus.observe(made, seed=0, num_canaries=256, tests=tests, **terms) as recorder:
        for step in range(last + 1):
            for value, own in zip(model.parameters(), rows, strict=True):
                value.grad_sample = own.clone()
            made.step()
            made.zero_grad()
            if step in (first, last):
                gc.collect()
                sizes[step] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sizes[last] - sizes[first] < 4000 * (last - first)
    assert (recorder._tests.noise.num_steps == last + 1) == tests
    if not tests:
        assert sizes[last] < 4e6


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_sampled_recorders_have_tests_too(private):
    made = private(noise_multiplier=NOISE, max_grad_norm=NORM)
    options = {"loader": made.loader, "num_canaries": 64, "delta": 1e-5, "seed": 0}
    with opacus.observe(made.optimizer, sampling=True, **options) as recorder:
        run(made, 40)
    assert recorder.diagnose(confidence=1 - LEVEL).findings == ()
    names = [finding.name for finding in recorder.diagnose(noise_multiplier=2 * NOISE).findings]
    assert names[:2] == ["noise-multiplier", "noise-variance"]
    assert recorder.facts.max_grad_norm == NORM


@pytest.mark.few(1)
@jax_is_new
@pytest.mark.parametrize("same_key", [False, True])
def test_noise_of_jax_is_kept_as_the_privatizer_added_it(same_key):
    grad_fn, privatizer = private_in_jax()
    update = privatizer.update
    if same_key:  # the state with its key never moves on

        def update(gradient, state, params=None):
            return privatizer.update(gradient, state, params)[0], state

    usual = {"sample_rate": 0.05, "num_steps": 60, "delta": 1e-5, "noise_multiplier": 0.5, "seed": 0}
    made = jax_privacy.observe(grad_fn, optax.GradientTransformation(privatizer.init, update), **usual)
    loop(made.grad_fn, made.privatizer)(60)
    diagnosis = made.recorder.diagnose(confidence=1 - LEVEL)
    if not same_key:
        assert diagnosis.noise.low < 1 < diagnosis.noise.high
    names = [finding.name for finding in diagnosis.findings]
    assert names[:1] == (["repeated-noise"] if same_key else [])


@jax_is_new
def test_sums_of_jax_are_kept_without_canaries():
    grad_fn, privatizer = private_in_jax()
    usual = {"sample_rate": 0.05, "num_steps": 3, "delta": 1e-5, "canary": dpaudit.Dirac(), "seed": 0}
    own, made = [], jax_privacy.observe(grad_fn, privatizer, **usual)

    def noted(params, *args, **options):
        own.append(flat(grad_fn(params, *args, **options)))
        return made.grad_fn(params, *args, **options)

    noted.has_aux = False
    loop(noted, made.privatizer, compiled=False)(3)
    record = made.recorder._tests.noise.record(1 / grad_fn.sensitivity())
    np.testing.assert_allclose(record.example_sums, np.stack(own), atol=1e-5)
    assert np.linalg.norm(record.sums[0]) > 1.5 * np.linalg.norm(record.example_sums[0])


def test_coordinates_are_all_of_a_small_model_and_the_same_ones_of_each_parameter_of_a_large_one():
    assert CoordinateSample.of([3, 5]).indices.tolist() == list(range(8))
    found = CoordinateSample.of([5000, 20, 5000])
    first, short, last = np.split(found.indices, np.cumsum(found.leaves)[:-1])
    np.testing.assert_array_equal(first, last - 5020)
    np.testing.assert_array_equal(short, np.arange(5000, 5020))
    assert first[-1] == 4999
    assert found.indices.size <= 1024
    many = CoordinateSample.of([7] * 3000)
    assert len(many.leaves) == many.indices.size == 1024


def test_coarse_numbers_are_not_taken_for_a_fault_of_the_noise():
    rng, check = np.random.default_rng(0), NoiseCheck()
    for _ in range(100):
        sums = 100 * rng.random(200)
        released = torch.as_tensor(sums + rng.standard_normal(200)).to(torch.bfloat16).double().numpy()
        check.observe(ObservedStep.of_release(released, sums, eps=2.0**-8))
    results = check.results(ClaimedStep(noise_multiplier=1.0, confidence=0.5))
    assert Diagnosis.of(results.checks, confidence=0.5).findings == ()


def recorded(num_steps, planned):
    read = DPSGDParams(noise_multiplier=1.0, sample_rate=0.05, delta=1e-5)
    claim = ReadClaim(lambda: read, DPSGDParams(num_steps=planned))
    recorder = Recorder(claim=claim, num_steps=planned, checks=[NoiseCheck()], scorer=PerStep(signal=1.0))
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        noise, present = rng.standard_normal(16), rng.random(16) < 0.5
        recorder.observe(ObservedStep.of_release(noise, np.zeros(16), leaves=(16,)))
        recorder.record(noise + present, present)
    return recorder


@pytest.mark.parametrize(
    ("planned", "sentence"),
    [(30, "after 20 of 30 steps a bound"), (None, "after a run of unplanned length a bound")],
)
def test_a_run_that_its_noise_may_have_ended_is_refused_in_a_sentence(planned, sentence):
    watched = recorded(20, planned)
    watched.live()
    with pytest.raises(dpaudit.InputError, match=f"{sentence}.*Pass num_steps= .* only after the end"):
        watched.diagnose()


def test_a_run_that_its_noise_cannot_have_ended_is_tested():
    assert recorded(30, 30).diagnose().checks
    assert recorded(20, 30).diagnose().checks  # ended by something else
    finished = recorded(30, 30)
    finished.live()
    assert finished.diagnose().checks
    closed = recorded(20, None)
    closed.close()
    closed.live()
    closed._repr_html_()
    assert closed.diagnose() == recorded(20, None).diagnose()


def test_a_recorder_of_no_noise_says_so():
    with pytest.raises(
        dpaudit.InputError, match=r"No step was recorded, so there is no noise to test\. Did training run\?"
    ):
        recorded(0, 30).diagnose()


def test_a_finished_training_of_opacus_is_judged_and_tested_alike_after_a_look():
    seen, unseen = (observed(Optimizer, 30, is_planned=False)[1] for _ in range(2))
    before = replace(unseen.audit(), times=None).to_dict()
    seen._repr_html_()
    seen.live()
    seen.trajectory()
    assert replace(seen.audit(), times=None).to_dict() == before
    assert seen.diagnose() == unseen.diagnose()


UNITS = {None: {}, **OTHER_KINDS}


@pytest.mark.few(5)
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("factor", [1.0, 0.6])
@pytest.mark.parametrize("kind", UNITS)
def test_the_amount_of_noise_is_read_in_the_units_of_its_clipping(train, monkeypatch, kind, factor):
    options = {"noise_multiplier": 0.5, "max_grad_norm": 1.5, **UNITS[kind]}
    own = flat_optimizer._generate_noise
    for module in (flat_optimizer, adaclipoptimizer, optimizer_fast_gradient_clipping):
        monkeypatch.setattr(module, "_generate_noise", lambda std, **known: own(factor * std, **known))
    recorder = train(num_steps=40, **options).recorder
    expected = factor
    if kind == "adaptive clipping":  # the noisy count of unclipped examples costs a part of the budget
        expected *= (0.5**-2 - (2 * 2.0) ** -2) ** -0.5 / 0.5
    found = recorder.diagnose(confidence=1 - LEVEL)
    assert found.noise.low < expected < found.noise.high
    assert found.noise.high / found.noise.low < 1.15
    assert ("noise-variance" in [finding.name for finding in found.findings]) == (factor < 1)

"""Canaries that Opacus clips on their own coordinates only score the same as canaries in full rows."""

import functools

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _mark_as_processed
from opacus_runs import DELTA, FAULTS, OTHER_KINDS, run, small_data, small_model, weights, without_clipping
from torch import nn

import dpaudit
from dpaudit.observers.opacus import _clipping, _gradient_canaries, observe
from dpaudit.observers.opacus._clipping import CoordinateIndex, GhostClip, PerSampleClip, clip_for
from dpaudit.observers.opacus._gradient_canaries import CanaryRoom

KINDS = [dpaudit.Dirac, dpaudit.Constant, dpaudit.Mixture, dpaudit.RandomDirection]
SETTINGS = {
    "flat": {},
    "per-layer": OTHER_KINDS["per-layer clipping"],
    "adaptive": OTHER_KINDS["adaptive clipping"],
    "ghost": {"grad_sample_mode": "ghost"},
}


def use_full_rows(monkeypatch):
    for clip in (PerSampleClip, GhostClip):
        monkeypatch.setattr(clip, "is_of_opacus", False)


def trust_any_code(monkeypatch):
    """Also code that is not part of Opacus gets rows of few coordinates."""
    monkeypatch.setattr(_clipping, "is_of_opacus", lambda *_: True)


def both(train, monkeypatch, **options):
    """A training whose canaries are compact, and the same with full rows."""
    compact = train(**options)
    use_full_rows(monkeypatch)
    return compact, train(**options)


def require_equal(compact, full):
    first, second = (made.recorder.state_dict() for made in (compact, full))
    np.testing.assert_array_equal(first["present"], second["present"])
    np.testing.assert_allclose(first["scores"], second["scores"], atol=2e-5)
    torch.testing.assert_close(compact.weights, full.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_compact_canaries_score_like_full_rows(train, monkeypatch, kind, setting):
    observer = {"canary": kind(moving=kind is dpaudit.Mixture), "num_canaries": 24}
    options = {"num_steps": 10, "noise_multiplier": 0.5, "observer": observer, **SETTINGS[setting]}
    require_equal(*both(train, monkeypatch, **options))


def test_full_rows_in_many_chunks_are_the_same_canaries(train, monkeypatch):
    monkeypatch.setattr(_clipping, "_CHUNK_ENTRIES", 1)
    observer = {"num_canaries": 64}
    require_equal(*both(train, monkeypatch, num_steps=10, noise_multiplier=0.5, observer=observer))


def test_diracs_change_the_sum_by_exactly_the_same_numbers(private, monkeypatch):
    found = []
    for full in (False, True):
        if full:
            use_full_rows(monkeypatch)
        made, sums = private(noise_multiplier=0.5), []
        own = made.optimizer.add_noise

        def noting(own=own, made=made, sums=sums):
            sums.append(torch.cat([value.summed_grad.reshape(-1) for value in made.optimizer.params]))
            own()

        made.optimizer.add_noise = noting
        with observe(made.optimizer, canary=dpaudit.Dirac(), seed=0, num_canaries=100):
            run(made, 5)
        found.append(torch.stack(sums))
    assert torch.equal(*found)


class Odd(nn.Module):
    """A scalar, a tensor of three dimensions and one whose memory has another order."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.cube = nn.Parameter(torch.ones(3, 4, 5))
        self.turned = nn.Parameter(torch.ones(6, 7).T)


@pytest.mark.parametrize("num_canaries", [3, 103])
def test_parameters_of_any_shape_get_their_canaries(monkeypatch, num_canaries):
    found = []
    for full in (False, True):
        if full:
            use_full_rows(monkeypatch)
        random, model = torch.Generator().manual_seed(0), Odd()
        made = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=0.5,
            max_grad_norm=1.0,
            expected_batch_size=8,
            generator=random,
        )
        with observe(made, seed=0, num_canaries=num_canaries) as recorder:
            for _ in range(5):
                for value in model.parameters():
                    value.grad_sample = torch.randn(8, *value.shape, generator=random)
                made.step()
                made.zero_grad()
        scores = torch.as_tensor(recorder.state_dict()["scores"])
        found.append(torch.cat([scores.view(-1), weights(model)]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_sum_whose_memory_has_another_order_is_written_in_place():
    total = torch.arange(42.0).view(6, 7).T
    CoordinateIndex(np.array([8, 41]), [total]).write([total], torch.tensor([100.0, 200.0]))
    expected = torch.arange(42.0).view(6, 7).T.reshape(-1)
    expected[[8, 41]] = torch.tensor([100.0, 200.0])
    assert torch.equal(total.reshape(-1), expected)


def test_chunks_of_one_canary_each_are_the_same_canaries(train, monkeypatch):
    at_once = train(num_steps=5, noise_multiplier=0.5)
    monkeypatch.setattr(_gradient_canaries, "_MAX_ENTRIES", 0)
    monkeypatch.setattr(_gradient_canaries, "_CHUNK_ROWS", 1e-9)
    require_equal(at_once, train(num_steps=5, noise_multiplier=0.5))


def clipped_to(factor):
    """Clipping to a multiple of the claimed norm."""

    def clip(optimizer, own=DPOptimizer.clip_and_accumulate):
        claimed = optimizer.max_grad_norm
        optimizer.max_grad_norm = factor * claimed
        own(optimizer)
        optimizer.max_grad_norm = claimed

    return clip


def clipped_by_value(optimizer):
    for value in optimizer.params:
        rows = optimizer._get_flat_grad_sample(value).clamp(-1.5, 1.5).sum(0)
        value.summed_grad = rows if value.summed_grad is None else value.summed_grad + rows
        _mark_as_processed(value.grad_sample)


def clipped_without_the_first_layer(optimizer):
    rows = [optimizer._get_flat_grad_sample(value) for value in optimizer.params]
    norms = torch.stack([part.flatten(1).norm(dim=1) for part in rows[1:]]).norm(dim=0)
    factors = (optimizer.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
    for value, part in zip(optimizer.params, rows, strict=True):
        total = torch.einsum("i,i...", factors, part)
        value.summed_grad = total if value.summed_grad is None else value.summed_grad + total


BROKEN = {
    **FAULTS,
    "twice the norm": ("clip_and_accumulate", clipped_to(2.0)),
    "by value": ("clip_and_accumulate", clipped_by_value),
    "without a layer": ("clip_and_accumulate", clipped_without_the_first_layer),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BROKEN)
def test_faults_are_detected_with_compact_canaries_too(train, monkeypatch, name):
    trust_any_code(monkeypatch)
    monkeypatch.setattr(DPOptimizer, *BROKEN[name])
    assert train(num_steps=150).recorder.audit().verdict is dpaudit.Verdict.VIOLATION


CAUSES = {
    "no clipping": "gradients are not clipped",
    "twice the norm": "gradients are clipped at about",
    "by value": "is the gradient clipped by value?",
    "without a layer": "the clipping norm leaves out 0.weight",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CAUSES)
def test_the_first_cause_of_a_fault_names_the_clipping_and_the_parameter(train, monkeypatch, name):
    trust_any_code(monkeypatch)
    monkeypatch.setattr(DPOptimizer, *BROKEN[name])
    found = train(num_steps=100).recorder.diagnose()
    assert "clipping" in [finding.name for finding in found.findings]
    assert CAUSES[name] in found.likely_causes()[0]


@pytest.mark.parametrize("name", ["no clipping", "twice the norm", "by value", "without a layer"])
def test_a_fault_scores_the_same_in_compact_and_in_full_rows(train, monkeypatch, name):
    trust_any_code(monkeypatch)
    monkeypatch.setattr(DPOptimizer, *BROKEN[name])
    compact, full = both(
        train, monkeypatch, num_steps=5, noise_multiplier=0.5, observer={"num_canaries": 100}
    )
    scores = [made.recorder.state_dict()["scores"] for made in (compact, full)]
    np.testing.assert_allclose(*scores, atol=1e-4 + 1e-7 * np.abs(scores[0]).max())  # some are a million


class Overriding(DPOptimizer):
    def clip_and_accumulate(self):
        super().clip_and_accumulate()


class OtherRows(DPOptimizer):
    @property
    def grad_samples(self):
        return super().grad_samples


class OtherNoise(DPOptimizer):
    def add_noise(self):
        super().add_noise()


def small_optimizer(kind=DPOptimizer):
    inside = torch.optim.SGD(small_model().parameters(), lr=0.1)
    return kind(inside, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)


def test_only_the_code_of_opacus_itself_gets_compact_rows(monkeypatch):
    kinds = {DPOptimizer: False, OtherNoise: False, Overriding: True, OtherRows: True}
    for kind, expected in kinds.items():
        assert PerSampleClip(small_optimizer(kind)).needs_full_rows is expected
    patched = small_optimizer()
    clip = PerSampleClip(patched)
    patched.clip_and_accumulate = lambda: None  # also after the observer was created
    assert clip.needs_full_rows
    wrapped = functools.wraps(DPOptimizer.clip_and_accumulate)(without_clipping)
    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", wrapped)
    assert PerSampleClip(small_optimizer()).needs_full_rows


class Weighting(DPOptimizer):
    weights = torch.ones(8)  # of the examples of the batch

    def clip_and_accumulate(self):
        for parameter in self.params:
            rows = self._get_flat_grad_sample(parameter).flatten(1).clamp(-0.01, 0.01)
            parameter.summed_grad = (self.weights @ rows).view_as(parameter)


def test_own_clipping_with_a_weight_per_example_is_told_which_call_it_cannot_do(private):
    made = private(noise_multiplier=1.0)
    inside = made.optimizer.original_optimizer
    optimizer = Weighting(inside, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)
    inputs, targets = small_data(8)[:]
    nn.functional.cross_entropy(made.model(inputs), targets).backward()
    with (
        pytest.raises(dpaudit.InputError, match="canaries are clipped in a call of their own"),
        observe(optimizer, sample_rate=0.1, num_steps=10, delta=1e-5),
    ):
        optimizer.step()


def test_there_are_1024_canaries_or_as_many_as_fit_and_64_if_they_need_full_rows():
    def default(kind, *sizes, norms=None, canary=dpaudit.Dirac()):  # noqa: B008
        inside = torch.optim.SGD([nn.Parameter(torch.zeros(size)) for size in sizes], lr=0.1)
        made = kind(inside, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)
        if norms is not None:
            made.max_grad_norms = norms
        full = clip_for(made, None).needs_full_rows
        return CanaryRoom(made, canary).default_number(needs_full_rows=full), made

    assert default(DPOptimizer, 5000, 10)[0] == 1024
    assert default(DPOptimizer, 500, 10)[0] == 510
    assert default(DPOptimizer, 500, 10, canary=dpaudit.Mixture())[0] == 255
    assert default(DPOptimizer, 5000, 70, 10, norms=[1.0] * 3, canary=dpaudit.Mixture())[0] == 35
    assert default(Overriding, 5000, 10)[0] == 64
    assert default(DPOptimizer, 20, 30, norms=[1.0, 1.0])[0] == 30
    count, made = default(DPOptimizer, 5000, 100, 2000, 10, norms=[1.0, 1.0, 1.0, 1.0])
    assert count == 100
    shares = [CanaryRoom(made, dpaudit.Dirac()).norm_share(one) for one in (count, 64)]
    assert shares[0] == shares[1]  # a larger number does not leave out layers


def test_the_attributes_and_parameters_of_the_optimizer_are_not_touched(train):
    made = train(num_steps=3, noise_multiplier=0.5, **OTHER_KINDS["adaptive clipping"])
    plain = train(num_steps=3, noise_multiplier=0.5, observed=False, **OTHER_KINDS["adaptive clipping"])
    assert vars(made.optimizer).keys() == vars(plain.optimizer).keys()
    for name in ("sample_size", "unclipped_num", "max_grad_norm"):
        assert torch.as_tensor(getattr(made.optimizer, name)) == torch.as_tensor(
            getattr(plain.optimizer, name)
        )
    assert len(made.optimizer.params) == 4


def test_the_cost_does_not_grow_with_canaries_times_parameters(private, monkeypatch):
    """Rows that the library clips have as many columns as a chunk has canaries."""
    seen, own = [], DPOptimizer.clip_and_accumulate

    def noting(optimizer):
        seen.append([tuple(part.shape) for part in optimizer.grad_samples])
        own(optimizer)

    trust_any_code(monkeypatch)
    made = private(noise_multiplier=0.5, build=lambda: nn.Linear(8, 2000), data=small_data)
    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", noting)
    with observe(made.optimizer, seed=0, num_canaries=4096, delta=DELTA):
        run(made, 1)
    numbers = sum(np.prod(shape) for shapes in seen[1:] for shape in shapes)
    assert 0 < numbers < 1000 * 4096  # full rows have 18,000 numbers each

"""Single examples in the first steps: their gradients are what is clipped, and looking changes nothing."""

import itertools

import pytest
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers import DPGRU, DPLSTM
from opacus_runs import DELTA, run, train_step, weights
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from dpaudit import Claim, Verdict
from dpaudit.observers.opacus import _single_examples, observe

STEPS, SEEDS = 9, range(10)
CLAIM = Claim.gaussian(noise_multiplier=1.0, delta=DELTA)


class Shared(nn.Module):
    """Uses the weight of a layer a second time, in a call that no hook sees."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 2)

    def forward(self, inputs):
        return self.last(linear(torch.tanh(self.first(inputs)), self.first.weight.T))


class Checkpointed(nn.Module):
    def __init__(self, *, has_same_masks=True):
        super().__init__()
        self.first, self.last, self.has_same_masks = nn.Linear(8, 16), nn.Linear(16, 2), has_same_masks
        self.inside = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 16), nn.Tanh())

    def forward(self, inputs):
        hidden = self.first(inputs)
        options = {"use_reentrant": True, "preserve_rng_state": self.has_same_masks}
        return self.last(checkpoint(self.inside, hidden, **options))


def convolution(padding_mode="zeros"):
    convolution = nn.Conv2d(1, 4, 3, padding=1, padding_mode=padding_mode)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), convolution, nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))


class Sequences(nn.Module):
    """Reads each number as a token of a sequence, and masks padding."""

    def __init__(self, layer):
        super().__init__()
        self.embedding, self.layer, self.last = nn.Embedding(10, 8), layer, nn.Linear(8, 2)

    def forward(self, inputs):
        tokens = (4 * inputs.abs()).long().clamp(max=9)
        hidden = self.layer(self.embedding(tokens))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        mask = (tokens > 0).unsqueeze(2)
        return self.last((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))


def normalized():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        *(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 1)),
        *(nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)),
    )


class Scaled(nn.Linear):
    """Multiplies what it returns, which the sampler of its base class does not know."""

    def forward(self, inputs):
        return 1.2 * super().forward(inputs)


def nested():
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), small_model_on(16))


def small_model_on(features):
    return nn.Sequential(nn.Linear(features, 16), nn.GELU(), nn.Linear(16, 2))


GHOST_FAULTS = {
    "a weight in a functional call": Shared,
    "other dropout masks": lambda: Checkpointed(has_same_masks=False),
    "a padding mode": lambda: convolution("circular"),
    "a sampler of another layer": lambda: nn.Sequential(Scaled(8, 16), nn.Tanh(), nn.Linear(16, 2)),
}
CORRECT = {
    "dropout": nested,
    "checkpoint": Checkpointed,
    "convolution": convolution,
    "norms": normalized,
    "padding": lambda: Sequences(nn.Linear(8, 8)),
    "LSTM": lambda: Sequences(DPLSTM(8, 8, batch_first=True)),
    "GRU": lambda: Sequences(DPGRU(8, 8, batch_first=True)),
}


def audited(made, seed=0, num_steps=STEPS, *, autocast=False):
    plain = made.model.forward

    def forward(*inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return plain(*inputs).float()

    made.model.forward = forward
    with observe(made.optimizer, module=made.model, loader=made.loader, claim=CLAIM, seed=seed) as recorder:
        run(made, num_steps)
    return recorder.audit()


def certain(result):
    return [finding.name for finding in result.findings if finding.p_value == 0]


@pytest.mark.parametrize("fault", GHOST_FAULTS)
def test_a_wrong_ghost_norm_is_found_with_every_seed(private, monkeypatch, fault):
    samplers = GradSampleModuleFastGradientClipping.NORM_SAMPLERS
    monkeypatch.setitem(samplers, Scaled, samplers[nn.Linear])
    for seed in SEEDS:
        made = private(build=GHOST_FAULTS[fault], seed=seed, noise_multiplier=1.0, grad_sample_mode="ghost")
        result = audited(made, seed)
        assert certain(result) == ["ghost-norm"]
        assert result.verdict is Verdict.VIOLATION


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("model", CORRECT)
def test_correct_gradients_are_not_flagged(private, model, mode, autocast):
    made = private(build=CORRECT[model], noise_multiplier=1.0, grad_sample_mode=mode)
    result = audited(made, autocast=autocast)
    assert (certain(result), result.to_check) == ([], ())
    assert not any("they were not compared" in gap for gap in result.not_covered)


def test_rows_that_do_not_add_up_to_the_gradient_of_the_batch_are_to_check(private):
    result = audited(private(build=Shared, noise_multiplier=1.0))
    [fact] = result.to_check
    assert fact.name == "row-gradient"
    assert fact.sentence.startswith("In 8 of 8 compared batches, the gradients of the examples do not add up")
    assert "replay" in result.details()
    assert certain(result) == []


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("model", [nested, Checkpointed, lambda: Checkpointed(has_same_masks=False)])
def test_a_run_is_the_same_as_without_a_look_at_its_gradients(private, monkeypatch, model, mode):
    ends = []
    for num_steps in (8, 0):
        monkeypatch.setattr(_single_examples, "_NUM_STEPS", num_steps)
        made = private(build=model, noise_multiplier=1.0, grad_sample_mode=mode)
        with observe(made.optimizer, module=made.model, loader=made.loader, claim=CLAIM, seed=0):
            for batch in itertools.islice(made.loader, STEPS):
                train_step(made, *batch)
        gradients = [value.grad for value in made.optimizer.params]
        ends.append([weights(made.model), torch.get_rng_state(), *gradients])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_later_steps_have_no_hooks(private, mode):
    made = private(noise_multiplier=1.0, grad_sample_mode=mode)
    with observe(made.optimizer, module=made.model, loader=made.loader, claim=CLAIM, seed=0):
        run(made, STEPS)
        assert not any(value._backward_hooks for value in made.optimizer.params)
        made.optimizer.zero_grad()
        made.criterion(made.model(torch.randn(4, 8)), torch.arange(4) % 2).backward()
        if mode == "ghost":
            assert type(made.model.get_clipping_coef()) is torch.Tensor


class FailsLater(nn.Module):
    """A layer whose second backward pass, that of a single example, fails."""

    def forward(self, inputs):
        outputs = inputs.clone()
        number = itertools.count(1)
        outputs.register_hook(lambda _: {}["gone"] if next(number) == 2 else None)
        return outputs


def test_a_model_whose_gradients_cannot_be_computed_again_is_not_covered(private):
    made = private(
        build=lambda: nn.Sequential(nn.Linear(8, 2), FailsLater()),
        noise_multiplier=1.0,
        grad_sample_mode="ghost",
    )
    result = audited(made, num_steps=8)
    assert any("they were not compared" in gap and "KeyError" in gap for gap in result.not_covered)
    assert certain(result) == []


def test_gradients_that_something_waits_for_are_not_computed_again(private):
    made = private(build=Checkpointed, noise_multiplier=1.0, grad_sample_mode="ghost")
    [handle] = [made.optimizer.params[0].register_post_accumulate_grad_hook(lambda _: None)]
    assert any("RuntimeError" in gap for gap in audited(made).not_covered)
    handle.remove()
    assert not any("RuntimeError" in gap for gap in audited(made).not_covered)

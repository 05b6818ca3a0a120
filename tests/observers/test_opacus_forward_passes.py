"""Repeated forward passes: examples that see each other are found, and a run is the same without a look."""

import gc
import itertools

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from opacus_runs import DELTA, run, train_step
from torch import nn
from torch.nn.functional import cross_entropy

from dpaudit import Claim, Verdict
from dpaudit.observers.opacus import _forward_passes, observe

STEPS, SEEDS = 9, range(10)
CLAIM = Claim.gaussian(noise_multiplier=1.0, delta=DELTA)


class Model(nn.Module):
    """Two layers with a function of all examples between them."""

    def __init__(self, between=lambda hidden: hidden, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.dropout, self.between = nn.Dropout(dropout), between

    def forward(self, inputs):
        return self.last(self.between(self.dropout(torch.tanh(self.first(inputs)))))


class Attention(nn.Module):
    def __init__(self, *, batch_first):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.attention = DPMultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, inputs):
        hidden = self.first(inputs.view(-1, 2, 4))
        return self.last(self.attention(hidden, hidden, hidden)[0].mean(1))


class Sequences(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding, self.layer, self.last = nn.Embedding(10, 8), layer, nn.Linear(8, 2)

    def forward(self, inputs):
        tokens = (4 * inputs.abs()).long().clamp(max=9)
        hidden = self.layer(self.embedding(tokens))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        mask = (tokens > 0).unsqueeze(2)
        return self.last((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))


class Experts(nn.Module):
    """Sorts its examples into frozen experts, with dropout inside."""

    def __init__(self, capacity=None):
        super().__init__()
        self.router, self.last, self.capacity = nn.Linear(8, 3), nn.Linear(8, 2), capacity
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)])
        for value in [*self.router.parameters(), *self.experts.parameters()]:
            value.requires_grad = False

    def forward(self, inputs):
        chosen, hidden = self.router(inputs).argmax(1), inputs.clone()
        for number, expert in enumerate(self.experts):
            places = torch.where(chosen == number)[0][: self.capacity]
            hidden[places] = expert(inputs[places]).to(hidden.dtype)
        return self.last(hidden)


class Stateful(Model):
    """Counts its passes, and keeps a mean of its inputs and all sizes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.sizes, self.num_passes = [], 0

    def forward(self, inputs):
        self.sizes.append(len(inputs))
        self.num_passes += 1
        outputs = super().forward(inputs - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        return outputs


def vote(hidden):
    return hidden * (1 + 0.5 * hidden.sum(1).sign().mean().sign())


def pack(hidden):
    """Put two examples into one sequence."""
    even = hidden[: len(hidden) // 2 * 2]
    pairs = even.view(-1, 2, 16).cumsum(1).reshape(even.shape)
    return torch.cat([pairs, hidden[len(even) :]])


COUPLED = {
    "softmax": lambda: Model(lambda hidden: 8 * hidden.softmax(0)),
    "softmax and dropout": lambda: Model(lambda hidden: 8 * hidden.softmax(0), dropout=0.5),
    "statistics": lambda: Model(lambda hidden: hidden - hidden.mean(0)),
    "statistics without a gradient": lambda: Model(lambda hidden: hidden / hidden.detach().abs().max()),
    "vote": lambda: Model(vote),
    "packing": lambda: Model(pack),
    "neighbor": lambda: Model(lambda hidden: hidden + 0.1 * hidden.roll(1, 0)),
    "layout": lambda: Attention(batch_first=False),
    "capacity": lambda: Experts(capacity=2),
}
CORRECT = {
    "dropout": lambda: Model(dropout=0.5),
    "attention": lambda: Attention(batch_first=True),
    "padding": lambda: Sequences(nn.Linear(8, 8)),
    "LSTM": lambda: Sequences(DPLSTM(8, 8, batch_first=True)),
    "GRU": lambda: Sequences(DPGRU(8, 8, batch_first=True)),
    "experts": Experts,
    "state": Stateful,
}


def audited(made, seed=0, num_steps=STEPS, *, autocast=False, **options):
    plain = made.model.forward

    def forward(*inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return plain(*inputs)

    made.model.forward = forward
    options = {"module": made.model, "loader": made.loader, "claim": CLAIM, "seed": seed} | options
    with observe(made.optimizer, **options) as recorder:
        run(made, num_steps)
    return recorder.audit()


def certain(result):
    return {finding.name for finding in result.findings if finding.p_value == 0}


@pytest.mark.parametrize("fault", COUPLED)
def test_examples_that_see_each_other_are_found_with_every_seed(private, fault):
    for seed in SEEDS:
        result = audited(private(build=COUPLED[fault], seed=seed, noise_multiplier=1.0), seed)
        assert certain(result) == {"coupled-examples"}
        assert result.verdict is Verdict.VIOLATION
    assert "work across the batch" in result.details()


@pytest.mark.parametrize("mode", ["ghost", "functorch"])
def test_they_are_found_with_other_ways_to_find_gradients(private, mode):
    made = private(build=COUPLED["softmax"], noise_multiplier=1.0, grad_sample_mode=mode)
    assert "coupled-examples" in certain(audited(made))


@pytest.mark.parametrize(("mode", "autocast"), [("hooks", False), ("hooks", True), ("ghost", False)])
@pytest.mark.parametrize("model", CORRECT)
def test_correct_models_are_not_flagged(private, model, mode, autocast):
    made = private(build=CORRECT[model], noise_multiplier=1.0, grad_sample_mode=mode)
    result = audited(made, autocast=autocast)
    assert (certain(result), result.to_check) == (set(), ())
    assert not any("see each other in the model" in gap for gap in result.not_covered)


@pytest.mark.parametrize(
    "between",
    [
        lambda hidden: 0.7 * hidden + 0.3 * hidden[torch.randperm(len(hidden))],
        lambda hidden: hidden + torch.arange(len(hidden))[:, None] / 10,
    ],
)
def test_random_mixing_and_places_in_the_batch_are_to_check(private, between):
    result = audited(private(build=lambda: Model(between), noise_multiplier=1.0))
    assert [fact.name for fact in result.to_check] == ["outputs-by-batch"]
    assert certain(result) == set()


def contrast(logits, targets):
    return cross_entropy(logits, targets, reduction="none") - (logits @ logits.T).softmax(1).diagonal().log()


def weighted(logits, targets):
    weight = 1 / torch.bincount(targets, minlength=2).clamp(min=1)
    return cross_entropy(logits, targets, weight=weight, reduction="none")


@pytest.mark.parametrize("loss", [contrast, weighted])
def test_losses_of_ghost_clipping_that_depend_on_other_examples_are_found(private, loss):
    made = private(noise_multiplier=1.0, grad_sample_mode="ghost")
    made.criterion.criterion = loss
    loss.reduction = "mean"
    [finding] = [finding for finding in audited(made).findings if finding.name == "coupled-examples"]
    assert finding.sentence.startswith("Losses change for examples that stay the same")


def test_outputs_that_the_loss_does_not_use_may_depend_on_other_examples(private):
    class Logged(Model):
        def forward(self, inputs):
            logits = super().forward(inputs)
            return {"logits": logits, "similar": logits @ logits.T, "mean": logits.mean()}

    made = private(build=Logged, noise_multiplier=1.0)
    loss = made.criterion
    made.criterion = lambda outputs, targets: loss(outputs["logits"], targets)
    assert certain(audited(made)) == set()
    made.criterion = lambda outputs, targets: loss(outputs["similar"][:, :2], targets)
    made.optimizer.zero_grad()
    assert certain(audited(made)) == {"coupled-examples"}


def test_masks_that_are_shared_by_all_examples_are_no_examples(private):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 2)

        def forward(self, mask, inputs):
            return self.last(inputs @ mask)

    made = private(build=Masked, noise_multiplier=1.0, poisson_sampling=False, batch_size=8)
    inside, mask = made.model, torch.ones(8, 8).tril()
    made.model = lambda inputs: inside(mask, inputs)  # as many rows as the batch
    with observe(made.optimizer, module=inside, claim=CLAIM, seed=0) as recorder:
        run(made, STEPS)
    result = recorder.audit()
    assert (certain(result), result.to_check) == (set(), ())
    assert not any("see each other in the model" in gap for gap in result.not_covered)


class Unrepeatable(Model):
    number = itertools.count()

    def forward(self, inputs):
        return super().forward(inputs) + next(Unrepeatable.number)


class FailsAgain(Model):
    def forward(self, inputs):
        if not torch.is_grad_enabled():
            raise ValueError("once")
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Unrepeatable, "its outputs differ when it runs on the same batch again"), (FailsAgain, "ValueError")],
)
def test_a_model_that_cannot_be_repeated_is_not_accused(private, model, why):
    result = audited(private(build=model, noise_multiplier=1.0))
    assert (certain(result), result.to_check) == (set(), ())
    [gap] = [gap for gap in result.not_covered if "see each other in the model" in gap]
    assert why in gap


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("model", [*CORRECT.values(), *COUPLED.values()])
def test_a_run_is_the_same_as_without_repeated_passes(private, monkeypatch, model, mode):
    ends = []
    for num_passes in (10, 0):
        monkeypatch.setattr(_forward_passes, "_NUM_PASSES", num_passes)
        made = private(build=model, noise_multiplier=1.0, grad_sample_mode=mode)
        with observe(made.optimizer, module=made.model, loader=made.loader, claim=CLAIM, seed=0):
            for batch in itertools.islice(made.loader, STEPS):
                train_step(made, *batch)
        values = [*made.model.state_dict().values(), *(value.grad for value in made.optimizer.params)]
        inside = made.model._module
        state = getattr(inside, "sizes", None), getattr(inside, "num_passes", None)
        ends.append(([*values, torch.get_rng_state()], state))
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    assert ends[0][1] == ends[1][1]


def test_later_steps_have_no_hooks(private):
    made = private(noise_multiplier=1.0)
    with observe(made.optimizer, module=made.model, loader=made.loader, claim=CLAIM, seed=0):
        run(made, 12)
        assert [*made.model._forward_hooks, *made.model._forward_pre_hooks] == []


def test_no_copy_of_a_batch_or_of_weights_stays_in_memory(private):
    class Large(Model):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(123, 457))

        def forward(self, inputs):
            return super().forward(inputs) + self.table.sum()

    def num_tables():
        gc.collect()
        tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter)]
        return sum(value.shape == (123, 457) for value in tensors)

    made = private(build=Large, noise_multiplier=1.0)
    with observe(made.optimizer, module=made.model, loader=made.loader, claim=CLAIM, seed=0) as recorder:
        for inputs, targets in itertools.islice(made.loader, 3):
            before = num_tables()
            outputs = made.model(inputs)
            assert num_tables() == before
            made.optimizer.zero_grad()
            made.criterion(outputs, targets).backward()
            made.optimizer.step()
    assert recorder.num_done == 3


def test_without_tests_no_pass_is_repeated(private):
    made = private(build=COUPLED["softmax"], noise_multiplier=1.0)
    with observe(made.optimizer, module=made.model, claim=CLAIM, seed=0, tests=False):
        assert [*made.model._forward_hooks, *made.model._forward_pre_hooks] == []

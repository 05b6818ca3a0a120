"""Between an update and the next release nothing changes the weights; what does is shown as to check."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_runs import DELTA, OTHER_KINDS, run, small_model, train_step, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpaudit.observers.opacus import _post_processing, observe

STEPS = 20


@pytest.fixture
def watched(private):
    """The diagnosis of a loop of a few steps; the loop gets what make_private made."""

    def go(loop=lambda made: run(made, STEPS), *, change=lambda _: None, **options):
        made = private(**({"noise_multiplier": 1.0, "num_steps": STEPS} | options))
        change(made)
        known = {"loader": made.loader, "module": made.model, "delta": DELTA, "seed": 0, "num_canaries": 16}
        with observe(made.optimizer, **known) as recorder:
            loop(made)
        return recorder.diagnose(noise_multiplier=1.0)

    return go


def shown(diagnosis):
    return {fact.name: fact.sentence for fact in diagnosis.to_check}


def looped(made, *, before=lambda _: None, after=lambda _: None, num_steps=STEPS):
    """A loop that does something else before and after each step."""
    epochs = itertools.chain.from_iterable(itertools.repeat(made.loader))
    for inputs, targets in itertools.islice(epochs, num_steps):
        before((made, inputs, targets))
        train_step(made, inputs, targets)
        after((made, inputs, targets))


def parameters(made):
    return list(made.model._module.parameters())


@torch.no_grad()
def push(made, size):
    for value in parameters(made):
        value.add_(size * torch.ones_like(value))


def second_optimizer(made):
    plain = torch.optim.SGD(parameters(made), lr=0.1)

    def leak(_):
        for value, rows in zip(parameters(made), made.optimizer.grad_samples, strict=True):
            value.grad = rows.mean(dim=0) if len(rows) else torch.ones_like(value)
        plain.step()

    looped(made, after=leak)


def optimizer_in_a_hook(made):
    def update(value):
        value.data.add_(value.grad, alpha=-0.01)

    for value in parameters(made):
        value.register_post_accumulate_grad_hook(update)
    run(made, STEPS)


def line_search(made):
    def search(batch):
        _, inputs, targets = batch
        with torch.no_grad():
            if not made.criterion(made.model(inputs), targets) < 0.3:
                for value in parameters(made):
                    value.mul_(0.9)

    looped(made, after=search)


def through_data(made):
    def leak(batch):
        for value in parameters(made):
            value.data = value.data + 1e-5 * batch[1].sum()

    looped(made, before=leak)


CHANGES = {
    change.__name__: change for change in (second_optimizer, optimizer_in_a_hook, line_search, through_data)
}


@pytest.mark.few(12)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seed", range(10))
def test_weights_that_change_elsewhere_are_to_check(watched, change, seed):
    found = watched(CHANGES[change], seed=seed)
    assert "Weights change between an update and the next release" in shown(found)["outside-update"]
    assert "outside-update" not in {finding.name for finding in found.findings}


class Lookup(nn.Module):
    """Rows of a large table that are looked up get a limited norm, in the forward pass."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(2000, 8, max_norm=0.5), nn.Linear(8, 2)

    def forward(self, inputs):
        return self.last(self.table((inputs.abs() * 300).long().clamp(max=1999)).mean(dim=1))


class Initialized(nn.Module):
    """The first batch sets the scale of a layer."""

    def __init__(self):
        super().__init__()
        self.rest, self.is_new = small_model(), True

    def forward(self, inputs):
        if self.is_new and self.training:
            self.is_new = False
            self.rest[0].weight.data /= inputs.std() + 1
        return self.rest(inputs)


@pytest.mark.few(6)
@pytest.mark.parametrize("build", [Lookup, Initialized])
@pytest.mark.parametrize("seed", range(10))
def test_weights_that_change_in_the_forward_pass_are_to_check(watched, build, seed):
    found = watched(build=build, seed=seed)
    names = {Lookup: "table.weight", Initialized: "rest.0.weight"}
    assert f"before step 0, {names[build]}." in shown(found)["outside-update"]


@pytest.mark.parametrize("first", [3, 12])
def test_a_change_in_late_steps_is_to_check_too(watched, first):
    numbers = itertools.count()
    found = watched(lambda made: looped(made, after=lambda _: next(numbers) >= first and push(made, 0.01)))
    assert "0.weight and 3 more" in shown(found)["outside-update"]


def test_a_hook_after_the_update_that_changes_weights_is_to_check(watched):
    def change(made):
        inner = made.optimizer.original_optimizer
        inner.register_step_post_hook(
            lambda *_: push(made, float(made.optimizer.params[0].summed_grad.norm()))
        )

    assert "outside-update" in shown(watched(change=change))


def decayed(made):
    def decay(_):
        with torch.no_grad():
            for value in parameters(made):
                value.mul_(0.999)

    looped(made, after=decay)


def limited(made):
    looped(made, after=lambda _: [value.data.clamp_(-0.1, 0.1) for value in parameters(made)])


@pytest.mark.parametrize("loop", [decayed, limited])
def test_decay_and_clipping_by_hand_are_to_check_and_no_finding(watched, loop):
    found = watched(loop)
    assert set(shown(found)) == {"outside-update"}
    assert not [finding for finding in found.findings if finding.p_value == 0]


def exchanged(made):
    """Averages are evaluated in place of the weights, in every step."""
    average = copy.deepcopy(parameters(made))

    def evaluate(batch):
        current = [value.detach().clone() for value in parameters(made)]
        with torch.no_grad():
            for mean, value in zip(average, parameters(made), strict=True):
                mean.lerp_(value, 0.1)
                value.copy_(mean)
            made.model(batch[1])
            for value, old in zip(parameters(made), current, strict=True):
                value.copy_(old)

    looped(made, after=evaluate)


def scheduled(made):
    rate = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.9)
    noise = ExponentialNoise(made.optimizer, gamma=0.99)
    looped(made, after=lambda _: (rate.step(), noise.step()))


def split(made):
    with BatchMemoryManager(
        data_loader=made.loader, max_physical_batch_size=4, optimizer=made.optimizer
    ) as loader:
        run(made, STEPS, loader)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.2), small_model())

    def forward(self, inputs):
        return self.rest(checkpoint(self.first, inputs, use_reentrant=False))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.last(self.second(self.first(inputs).tanh()))


def frozen():
    model = small_model()
    model[0].requires_grad_(False)
    return model


class Calling(torch.optim.SGD):
    """An optimizer whose step() calls that of its base class, and then changes weights itself."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value.mul_(0.999)


TWINS = {
    "plain": {},
    **OTHER_KINDS,
    "momentum": {
        "optimizer": lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9, weight_decay=0.01)
    },
    "adam": {"optimizer": lambda values: torch.optim.Adam(values, lr=0.01, foreach=True)},
    "adamw": {"optimizer": lambda values: torch.optim.AdamW(values, lr=0.01, fused=True)},
    "base class": {"optimizer": lambda values: Calling(values, lr=0.1)},
    "averages": {"loop": exchanged},
    "schedules": {"loop": scheduled},
    "accumulation": {"loop": split},
    "dropout and checkpointing": {"build": Recomputed},
    "tied": {"build": Tied},
    "frozen": {"build": frozen},
}


@pytest.mark.parametrize("twin", TWINS)
def test_weights_that_only_the_update_changes_are_not_mentioned(watched, twin):
    assert "outside-update" not in shown(watched(**TWINS[twin]))


def test_layers_that_are_frozen_and_unfrozen_in_phases_are_not_mentioned(private):
    made = private(noise_multiplier=1.0)
    for is_trained in (True, False, True):
        made.model._module[0].requires_grad_(is_trained)
        known = {"loader": made.loader, "module": made.model, "delta": DELTA, "num_canaries": 4}
        with observe(made.optimizer, **known) as recorder:
            run(made, 5)
        assert "outside-update" not in shown(recorder.diagnose(noise_multiplier=1.0))


class Masked(torch.optim.SGD):
    """Updates only where the sum before the noise has the sign of the release."""

    def step(self, closure=None):
        for value in self.param_groups[0]["params"]:
            value.grad = value.grad * (value.grad * value.summed_grad > 0)
        super().step(closure)


class Scaled(torch.optim.SGD):
    """Takes shorter steps if rows are long, from the second update on."""

    def step(self, closure=None):
        self.num_updates = getattr(self, "num_updates", 0) + 1
        if self.num_updates > 1:
            rows = self.param_groups[0]["params"][0].grad_sample
            self.param_groups[0]["lr"] = 0.1 / (1 + float(rows.norm()))
        super().step(closure)


class OwnRate(DPOptimizer):
    """Sets the learning rate by the length of the sum before the noise."""

    def pre_step(self, closure=None):
        is_complete = super().pre_step(closure)
        self.param_groups[0]["lr"] = 1 / (1 + float(self.params[0].summed_grad.norm()))
        return is_complete


def patched(made):
    inner = made.optimizer.original_optimizer
    original = inner.step

    def step(closure=None):
        before = [value.detach().clone() for value in parameters(made)]
        original(closure)
        with torch.no_grad():
            for value, old in zip(parameters(made), before, strict=True):
                value.copy_(torch.where(value.summed_grad.abs() > 0.1, value, old))

    inner.step = step


def of_class(kind):
    def change(made):
        made.optimizer.__class__ = kind

    return change


BY_SUM = {
    "masked": {"optimizer": lambda values: Masked(values, lr=0.1, momentum=0.9)},
    "scaled": {"optimizer": lambda values: Scaled(values, lr=0.1)},
    "own rate": {"change": of_class(OwnRate)},
    "patched": {"change": patched},
}


@pytest.mark.few(12)
@pytest.mark.parametrize("fault", BY_SUM)
@pytest.mark.parametrize("seed", range(10))
def test_an_update_that_depends_on_the_sum_before_the_noise_is_found(watched, fault, seed):
    found = watched(**BY_SUM[fault], seed=seed)
    assert "update-by-sum" in {finding.name for finding in found.findings}


def test_an_update_of_ghost_clipping_that_depends_on_the_sum_is_found(watched):
    found = watched(**BY_SUM["masked"], grad_sample_mode="ghost")
    assert "update-by-sum" in {finding.name for finding in found.findings}


class Lion(torch.optim.Optimizer):
    """An optimizer that is not of torch, with state, weight decay and random numbers of every library."""

    def __init__(self, values, lr=0.01):
        super().__init__(values, {"lr": lr})
        self.num_updates, self.noise = 0, torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        self.num_updates += 1
        for value in self.param_groups[0]["params"]:
            state = self.state[value]
            state["mean"] = state.get("mean", torch.zeros_like(value)).lerp(value.grad, 0.1)
            value.mul_(0.999).sub_(state["mean"].sign(), alpha=self.param_groups[0]["lr"])
            value.add_(torch.randn_like(value) + torch.randn(value.shape, generator=self.noise), alpha=1e-3)
            value.add_(1e-3 * random.random() + 1e-3 * np.random.standard_normal())  # noqa: NPY002


class Counted(DPOptimizer):
    """An optimizer with a counter, a limit of the release and decay of its own."""

    num_done = 0

    def scale_grad(self):
        super().scale_grad()
        nn.utils.clip_grad_norm_(self.params, 0.5)

    def step(self, closure=None):
        self.num_done += 1
        result = super().step(closure)
        with torch.no_grad():
            for value in self.params:
                value.mul_(0.999)
        return result


OWN = {
    "lion": {"optimizer": Lion},
    "counted": {"change": of_class(Counted)},
    "base class": {"optimizer": lambda values: Calling(values, lr=0.1)},
}


@pytest.mark.parametrize(
    ("kind", "mode"), [("lion", "hooks"), ("lion", "ghost"), ("counted", "hooks"), ("base class", "hooks")]
)
def test_an_own_update_that_is_repeated_leaves_everything_as_it_was(private, monkeypatch, kind, mode):
    options, states = dict(OWN[kind]), []
    change = options.pop("change", lambda _: None)
    for is_repeated in (True, False):
        if not is_repeated:
            monkeypatch.setattr(_post_processing.RepeatedUpdate, "is_due", lambda *_: False)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        made = private(noise_multiplier=1.0, grad_sample_mode=mode, **options)
        change(made)
        known = {"loader": made.loader, "module": made.model, "delta": DELTA, "seed": 0, "num_canaries": 4}
        with observe(made.optimizer, **known) as recorder:
            run(made, STEPS)
        diagnosis, inner = recorder.diagnose(noise_multiplier=1.0), made.optimizer.original_optimizer
        assert "update-by-sum" not in {finding.name for finding in diagnosis.findings}
        assert not [gap for gap in recorder.not_covered if "cannot be repeated" in gap]
        counts = [vars(made.optimizer).get("num_done"), vars(inner).get("num_updates")]
        generators = [float(torch.rand(1)), random.random(), np.random.random()]  # noqa: NPY002
        moments = [state["mean"].tolist() for state in inner.state.values() if "mean" in state]
        states.append((weights(made.model).tolist(), counts, generators, moments))
    assert states[0] == states[1]


class Schedule:
    num_done = 0

    def rate(self):
        self.num_done += 1
        return 0.1 / self.num_done


class Scheduling(torch.optim.SGD):
    """An optimizer with a schedule whose state nobody can save."""

    def step(self, closure=None):
        self.schedule = getattr(self, "schedule", Schedule())
        self.param_groups[0]["lr"] = self.schedule.rate()
        super().step(closure)


class InPlace(DPOptimizer):
    """Adds its noise to the sum itself, and takes the sum for the release."""

    def add_noise(self):
        for value in self.params:
            value.summed_grad.add_(torch.randn_like(value.summed_grad))
            value.grad = value.summed_grad.clone()

    def scale_grad(self):
        for value in self.params:
            value.grad = value.summed_grad / self.expected_batch_size


@pytest.mark.parametrize("change", [None, of_class(InPlace)], ids=["hidden state", "noise in place"])
def test_an_update_that_cannot_be_repeated_is_not_covered_and_no_finding(private, change):
    made = private(noise_multiplier=1.0, optimizer=lambda values: Scheduling(values, lr=0.1))
    made.optimizer.original_optimizer.schedule = schedule = Schedule()
    if change is not None:
        change(made)
    with observe(
        made.optimizer, loader=made.loader, module=made.model, delta=DELTA, num_canaries=4
    ) as recorder:
        run(made, STEPS)
    assert any("update of Scheduling is a function of the release" in gap for gap in recorder.not_covered)
    assert schedule.num_done == STEPS
    assert "update-by-sum" not in {finding.name for finding in recorder.diagnose().findings}


@pytest.mark.parametrize("twin", TWINS)
def test_updates_of_torch_and_opacus_are_not_repeated(watched, twin, monkeypatch):
    if twin == "base class":
        pytest.skip("it has code of its own")
    monkeypatch.setattr(_post_processing.RepeatedUpdate, "follows_release", lambda _: pytest.fail("repeated"))
    watched(**TWINS[twin])

"""Replays of steps with Opacus: each fault has its name, and correct steps have no finding."""

import copy
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_runs import OTHER_KINDS, small_data, small_model, weights
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import dpaudit
from dpaudit.observers.opacus import observe, replay

NUM = 8


@pytest.fixture
def made(private):
    """A private model and its parts, with a batch of both classes."""

    def build(**options):
        found = private(**({"noise_multiplier": 1.0, "batch_size": 10} | options))
        torch.manual_seed(1)
        data = small_data(NUM)[:]
        found.batch = (data[0], torch.arange(NUM) % 2)
        return found

    return build


def private_step(made, inputs, targets, loss=cross_entropy):
    made.optimizer.zero_grad()
    loss(made.model(inputs), targets).backward()
    made.optimizer.step()


def replayed(made, step, **options):
    return replay(
        lambda batch: step(made, *batch),
        made.batch,
        **({"optimizer": made.optimizer, "model": made.model} | options),
    )


def names(result):
    return [finding.name for finding in result.findings]


# ---- faults, each with the name of its finding ----


def class_weights(made, inputs, targets):
    weight = torch.bincount(targets, minlength=2).float().clamp(min=1).reciprocal()
    private_step(made, inputs, targets, lambda logits, y: cross_entropy(logits, y, weight=weight))


def centered(made, inputs, targets):
    private_step(made, inputs - inputs.mean(dim=0), targets)


def two_rows(made, inputs, targets):
    private_step(made, torch.cat([inputs, inputs + 0.1]), torch.cat([targets, targets]))


def divided_by_batch(made, inputs, targets):
    made.optimizer.expected_batch_size = len(inputs)
    private_step(made, inputs, targets)


def scheduled_by_loss(made, inputs, targets):
    with torch.no_grad():
        loss = cross_entropy(made.model(inputs), targets).item()
    made.optimizer.param_groups[0]["lr"] = 0.5 * loss
    private_step(made, inputs, targets)


def moments_of_sums(made, inputs, targets):
    private_step(made, inputs, targets)
    for parameter in made.optimizer.params:
        state = made.optimizer.original_optimizer.state[parameter]
        state["raw"] = 0.9 * state.get("raw", 0.0) + parameter.summed_grad.detach()


def buffered(made, inputs, targets):
    private_step(made, inputs, targets)
    made.model._module.seen.copy_(inputs.mean(dim=0))


def second_optimizer(made, inputs, targets):
    made.optimizer.zero_grad()
    made.extra.zero_grad()
    (cross_entropy(made.model(inputs), targets) + made.scale * inputs.mean()).backward()
    made.optimizer.step()
    made.extra.step()


def written_weights(made, inputs, targets):
    private_step(made, inputs, targets)
    with torch.no_grad():
        made.optimizer.params[0].add_(1e-4 * inputs.mean())


def skips_small(made, inputs, targets):
    if len(inputs) >= NUM:
        private_step(made, inputs, targets)


def raises_on_small(made, inputs, targets):
    assert len(inputs) >= NUM
    private_step(made, inputs, targets)


class Average:
    def __init__(self):
        self.value = 0.0

    def add(self, inputs):
        self.value = 0.9 * self.value + inputs.mean().item()


STEP_FAULTS = {
    class_weights: "coupled-examples",
    centered: "coupled-examples",
    two_rows: "rows-per-example",
    divided_by_batch: "divisor",
    scheduled_by_loss: "hyperparameters",
    moments_of_sums: "optimizer-state",
    buffered: "buffers",
    second_optimizer: "weights",
    written_weights: "weights",
    skips_small: "release-count",
    raises_on_small: "failing-step",
}


def with_parts(made):
    """Add what some faults write to."""
    made.model._module.register_buffer("seen", torch.zeros(8))
    made.scale = torch.nn.Parameter(torch.ones(()))
    made.model._module.register_parameter("scale", made.scale)
    made.extra = torch.optim.SGD([made.scale], lr=0.1)
    return made


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("step", "name"), STEP_FAULTS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_of_the_step_has_its_name(made, step, name):
    one = with_parts(made())
    result = replayed(one, step, other_optimizers=[one.extra])
    assert names(result)[0] == name, str(result)
    assert result.is_violation
    assert name in str(result)
    assert result.likely_causes()
    with pytest.raises(dpaudit.ViolationError, match=name):
        result.raise_for_violation()


def bare_step(one, source):
    """A step that also trains a number that belongs to no module, on ``source(inputs)``."""
    extra = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)

    def step(batch):
        (extra.param_groups[0]["params"][0] * source(batch[0])).backward()
        extra.step()
        private_step(one, *batch)

    return extra, step


def test_a_parameter_of_no_module_is_compared(made):
    one = made()
    options = {"optimizer": one.optimizer, "model": one.model}
    extra, step = bare_step(one, torch.mean)
    [scale] = extra.param_groups[0]["params"]
    assert names(replay(step, one.batch, **options, other_optimizers=[extra])) == ["weights"]
    assert names(replay(step, one.batch, **options, published_state=[scale])) == ["other-state"]
    assert scale.item() == 1.0
    assert names(replay(step, one.batch, **options, private_state=[scale])) == []
    extra, public = bare_step(one, lambda _: 0.5)
    assert names(replay(public, one.batch, **options, other_optimizers=[extra])) == []


def std_of_largest(self):
    norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in self.grad_samples]).norm(dim=0)
    std = self.noise_multiplier * min(float(norms.max()), self.max_grad_norm)
    for parameter in self.params:
        parameter.grad = parameter.summed_grad + std * torch.randn_like(parameter)


def std_of_size(self):
    std = self.noise_multiplier * self.max_grad_norm * (len(self.grad_samples[0]) / NUM) ** 0.5
    for parameter in self.params:
        parameter.grad = parameter.summed_grad + std * torch.randn_like(parameter)


def unclipped(self):
    for parameter in self.params:
        parameter.summed_grad = self._get_flat_grad_sample(parameter).sum(dim=0)


OPTIMIZER_FAULTS = {
    "std of the largest norm": ("add_noise", std_of_largest, "batch-dependent-noise"),
    "std of the batch size": ("add_noise", std_of_size, "batch-dependent-noise"),
    "no clipping": ("clip_and_accumulate", unclipped, "sensitivity"),
}


@pytest.mark.parametrize("fault", OPTIMIZER_FAULTS)
def test_a_fault_of_the_optimizer_has_its_name(made, fault, monkeypatch):
    method, broken, name = OPTIMIZER_FAULTS[fault]
    monkeypatch.setattr(DPOptimizer, method, broken)
    assert names(replayed(made(), private_step))[0] == name


@pytest.mark.parametrize("counted", [1.0, 2.0])
def test_every_label_of_the_batch_is_tried(made, monkeypatch, counted):
    """Rows of class 0 count twice after clipping; neither the last example nor the first other label is 0."""
    one = made(build=lambda: nn.Linear(8, 4))
    one.batch = one.batch[0], torch.tensor([1, 2, 1, 2, 0, 1, 2, 3])

    def weighted(self):
        rows = [part.flatten(1) for part in self.grad_samples]
        norms = torch.stack([part.norm(dim=1) for part in rows]).norm(dim=0)
        factors = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
        factors = factors * torch.where(one.targets == 0, counted, 1.0)
        for parameter, part in zip(self.params, rows, strict=True):
            parameter.summed_grad = (factors @ part).view_as(parameter)

    def step(one, inputs, targets):
        one.targets = targets
        private_step(one, inputs, targets)

    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", weighted)
    result = replayed(one, step)
    assert names(result) == (["sensitivity"] if counted > 1 else [])
    assert sum("yet another label" in check.change for check in result.checks) == 4
    if counted > 1:
        assert "yet another label" in result.findings[0].sentence


# ---- correct steps ----


def with_averages(made, inputs, targets):
    private_step(made, inputs, targets)
    made.scheduler.step()
    made.ema.update_parameters(made.model)
    made.losses.append(inputs.mean().item())
    made.meter.add(inputs)


def clips_the_release(made, inputs, targets):
    made.optimizer.zero_grad()
    cross_entropy(made.model(inputs), targets).backward()
    made.optimizer.pre_step()
    nn.utils.clip_grad_norm_(made.optimizer.params, 0.1)
    made.optimizer.original_optimizer.step()


def two_steps(made, inputs, targets):
    private_step(made, inputs, targets)
    private_step(made, inputs, targets)


def padded_by_zero_losses(made, inputs, targets):
    weights = (torch.arange(12) < len(inputs)).float()
    rows = torch.arange(12).clamp(max=len(inputs) - 1)

    def loss(logits, y):
        return (weights * cross_entropy(logits, y, reduction="none")).sum() / 12

    private_step(made, inputs[rows], targets[rows], loss)


def by_length(made, inputs, targets):
    """Sort the examples, as for padding, and give each class a pass of its own."""
    order = inputs.norm(dim=1).argsort()
    parts = [order[targets[order] == label] for label in targets.unique()]
    for index, rows in enumerate(parts):
        made.optimizer.signal_skip_step(do_skip=index < len(parts) - 1)
        private_step(made, inputs[rows], targets[rows])


def managed(made, inputs, targets):
    loader = DataLoader(TensorDataset(inputs, targets), batch_sampler=[range(len(inputs))])
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=made.optimizer) as parts:
        for part in parts:
            private_step(made, *part)


CORRECT_STEPS = [
    managed,
    private_step,
    with_averages,
    clips_the_release,
    two_steps,
    padded_by_zero_losses,
]


@pytest.mark.few(3)
@pytest.mark.parametrize("step", CORRECT_STEPS, ids=lambda step: step.__name__)
def test_a_correct_step_has_no_finding(made, step):
    one = made(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    one.scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer.original_optimizer, 1)
    one.ema, one.losses, one.meter = AveragedModel(one.model._module), [], Average()
    hidden = [one.losses, one.meter]
    result = replayed(one, step, published_state=[one.scheduler, one.ema], private_state=hidden)
    assert names(result) == [], str(result)
    result.raise_for_violation()
    assert result.largest <= 1.001
    assert one.losses == []
    assert one.meter.value == 0.0


@pytest.mark.parametrize("is_random", [False, True])
def test_examples_may_be_sorted_and_split_by_their_content(made, is_random):
    result = replayed(made(build=dropout_model) if is_random else made(), by_length)
    assert names(result) == [], str(result)
    assert any("orders its examples" in text for text in result.not_covered) == is_random


def longest_half(made, inputs, targets):
    order = inputs.norm(dim=1).argsort(descending=True)[: NUM // 2]
    private_step(made, inputs[order], targets[order])


def sorted_and_centered(made, inputs, targets):
    centered(made, inputs[inputs.norm(dim=1).argsort()], targets)


@pytest.mark.parametrize("step", [longest_half, sorted_and_centered])
def test_examples_that_are_sorted_may_still_be_coupled(made, step):
    """The longest half is one gradient less and one more, as if an example had been replaced."""
    assert "coupled-examples" in names(replayed(made(), step))


def accepts_by_loss(made, inputs, targets):
    """Undo a step after which the loss of the batch is larger."""
    before = [parameter.detach().clone() for parameter in made.optimizer.params]
    with torch.no_grad():
        loss = cross_entropy(made.model(inputs), targets)
    private_step(made, inputs, targets)
    with torch.no_grad():
        if cross_entropy(made.model(inputs), targets) > loss:
            for parameter, value in zip(made.optimizer.params, before, strict=True):
                parameter.copy_(value)


def test_a_step_that_no_single_example_undoes_is_compared_with_other_batches(made):
    one = made(noise_multiplier=0.01)
    one.batch = one.batch[0].repeat(4, 1), one.batch[1].repeat(4)
    result = replayed(one, accepts_by_loss)
    assert names(result) == ["weights"]


def test_noise_is_compared_without_clipping(made, monkeypatch):
    """Every gradient exceeds a small clipping norm: only a larger one shows what the noise follows."""
    monkeypatch.setattr(DPOptimizer, "add_noise", std_of_largest)
    result = replayed(made(max_grad_norm=0.01), private_step)
    assert names(result) == ["batch-dependent-noise"]
    assert "if the clipping norm is large" in result.findings[0].sentence


# ---- several optimizers ----


def two_models(made, inputs, targets):
    private_step(made, inputs, targets)
    private_step(made.second, inputs, targets)


@pytest.mark.parametrize("kind", ["private", "plain", "unclipped"])
def test_a_second_optimizer_must_be_private(made, private, kind):
    one = made()
    one.second = private(noise_multiplier=1.0, batch_size=10)
    if kind == "plain":
        model = small_model()
        one.second = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    if kind == "unclipped":
        one.second.optimizer.clip_and_accumulate = unclipped.__get__(one.second.optimizer)
    before = weights(one.second.model)
    result = replayed(one, two_models, other_optimizers=[one.second.optimizer])
    assert names(result) == {"private": [], "plain": ["weights"], "unclipped": ["sensitivity"]}[kind]
    assert any("2 private optimizers" in text for text in result.not_covered) == (kind != "plain")
    assert torch.equal(before, weights(one.second.model))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["ghost", "functorch", "ew", "per-layer clipping"])
@pytest.mark.parametrize("step", [private_step, class_weights])
def test_every_clipping_mode_is_replayed(made, kind, step):
    one = made(**OTHER_KINDS[kind])

    def run(made, inputs, targets):
        if step is class_weights and made.ghost:
            weight = torch.bincount(targets, minlength=2).float().clamp(min=1).reciprocal()
            made.criterion.criterion.weight = weight
        if made.ghost:
            private_step(made, inputs, targets, made.criterion)
        else:
            step(made, inputs, targets)

    assert names(replayed(one, run)) == ([] if step is private_step else ["coupled-examples"])


def test_ghost_clipping_that_is_bypassed_is_named(made):
    one = made(grad_sample_mode="ghost")
    assert names(replayed(one, private_step))[0] == "missing-clipping"


def dropout_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Tanh(), nn.Dropout(), nn.Linear(16, 2))


def test_with_dropout_only_replaced_examples_count(made):
    result = replayed(made(build=dropout_model), private_step)
    assert names(result) == []
    assert [check.allowed for check in result.checks if not np.isnan(check.distance)].count(1.0) == 0
    assert any("dropout" in text for text in result.not_covered)
    assert names(replayed(made(build=dropout_model), class_weights)) == ["coupled-examples"]


def test_a_non_finite_example_is_a_category_of_its_own(made):
    result = replayed(made(), private_step)
    assert [finding.name for finding in result.non_finite] == ["non-finite-example"]
    assert not result.is_violation
    assert "non-finite-example" in str(result)

    def safe(made, inputs, targets):
        private_step(made, inputs.nan_to_num(), targets)

    assert replayed(made(), safe).non_finite == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_replayed(made, dtype):
    one = made(build=lambda: small_model().to(dtype))
    one.batch = (one.batch[0].to(dtype), one.batch[1])
    assert names(replayed(one, private_step)) == []
    assert "coupled-examples" in names(replayed(one, centered))


def token_model():
    return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 2))


def test_batches_of_integers_in_a_dictionary_are_replayed(made):
    one = made(build=token_model)
    tokens = torch.randint(20, (NUM, 4))
    batch = {"tokens": tokens, "labels": torch.arange(NUM) % 2}
    result = replay(
        lambda batch: private_step(one, batch["tokens"], batch["labels"]),
        batch,
        optimizer=one.optimizer,
        model=one.model,
    )
    assert names(result) == []
    assert result.non_finite == ()


# ---- state ----


def everything(made):
    return copy.deepcopy(
        {
            "model": made.model.state_dict(),
            "optimizer": made.optimizer.state_dict(),
            "history": made.engine.accountant.history,
            "attributes": {
                name: value
                for name, value in vars(made.optimizer).items()
                if name not in {"original_optimizer", "step_hook"}
            },
            "gradients": [[parameter.grad, sorted(vars(parameter))] for parameter in made.optimizer.params],
            "random": [torch.get_rng_state(), np.random.get_state()[1], random.getstate()],  # noqa: NPY002
        }
    )


def flat_state(value):
    if isinstance(value, dict):
        return [part for key in value for part in [key, *flat_state(value[key])]]
    if isinstance(value, list | tuple):
        return [part for one in value for part in flat_state(one)]
    return [value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value]


def interrupted(made, inputs, targets):
    private_step(made, inputs, targets)
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", [private_step, skips_small, interrupted])
@pytest.mark.parametrize("is_trained", [False, True])
def test_everything_is_as_before_after_a_replay(made, step, is_trained):
    one = made(optimizer=torch.optim.Adam)
    if is_trained:
        private_step(one, *one.batch)
    before, hooks = everything(one), len(one.optimizer.original_optimizer._optimizer_step_pre_hooks)
    try:
        replayed(one, step)
    except KeyboardInterrupt:
        assert step is interrupted
    assert flat_state(everything(one)) == flat_state(before)
    assert len(one.optimizer.original_optimizer._optimizer_step_pre_hooks) == hooks
    assert "add_noise" not in vars(one.optimizer)


def test_named_objects_are_compared_or_only_restored(made):
    one, other = made(), nn.Linear(8, 1)
    another = torch.optim.SGD(other.parameters(), lr=0.1)

    def step(made, inputs, targets):
        private_step(made, inputs, targets)
        another.zero_grad()
        other(inputs).mean().backward()
        another.step()

    before = other.weight.detach().clone()
    result = replayed(one, step, published_state=[other])
    assert names(result) == ["other-state"]
    assert "published_state[0].weight" in str(result)
    assert torch.equal(other.weight, before)
    assert names(replayed(one, step, private_state=[other, another])) == []


class Trainer:
    def __init__(self, made):
        self.model, self.optimizer, self.average = made.model, made.optimizer, AveragedModel(nn.Linear(8, 1))

    def step(self, batch):
        private_step(self, *batch)
        with torch.no_grad():
            self.average.module.weight.add_(batch[0].mean())


def test_a_method_is_replayed_with_what_its_object_holds(made):
    one = Trainer(made())
    before = one.average.module.weight.detach().clone()
    for named in (one, one.average):
        options = {"optimizer": one.optimizer, "model": one.model, "published_state": [named]}
        assert names(replay(one.step, made().batch, **options)) == ["other-state"]
        assert torch.equal(one.average.module.weight, before)


# ---- refusals ----


def refused(made, step=private_step, **options):
    with pytest.raises(dpaudit.InputError) as error:
        replayed(made, step, **options)
    return str(error.value)


def test_what_cannot_be_replayed_is_refused(made):
    assert "Adaptive clipping" in refused(made(**OTHER_KINDS["adaptive clipping"]))
    secure = made()
    secure.optimizer.secure_mode = True
    assert "secure_mode" in refused(secure)
    one = made()
    with observe(one.optimizer):
        assert "another observer" in refused(one)
    one.optimizer = one.optimizer.original_optimizer
    assert "make_private" in refused(one)


def test_a_step_that_does_not_repeat_itself_is_refused(made):
    one, data = made(), iter(torch.randn(99, NUM, 8))

    def reads_more(made, _, targets):
        private_step(made, next(data), targets)

    assert "bit for bit" in refused(one, reads_more)


def test_a_step_with_data_of_its_own_is_refused(made):
    one = made()
    fixed = tuple(part.clone() for part in one.batch)
    assert "loader of its own" in refused(one, lambda made, *_: private_step(made, *fixed))
    assert "added no noise" in refused(one, lambda *_: None)


# ---- what one step leaves to the next ----


def rate_by_the_count_so_far(made, seen, batch):
    made.optimizer.param_groups[0]["lr"] = 0.1 * 0.99 ** sum(seen)
    private_step(made, *batch)
    seen.append(len(batch[0]))


def queue_of_outputs(made, queue, batch):
    private_step(made, *batch, lambda logits, y: cross_entropy(logits @ torch.stack(list(queue)).T, y))
    with torch.no_grad():
        queue.extend(made.model(batch[0]))


def mean_in_an_object(made, state, batch):
    private_step(made, batch[0] - (state[0].value if state else 0.0), batch[1])
    state[:] = [SimpleNamespace(value=0.1 * batch[0].mean(dim=0))]


def skips_rising_losses(made, losses, batch):
    losses.append(batch[0].square().mean().item())
    if losses[-1] <= 1.5 * losses[0]:
        private_step(made, *batch)


LATER_FAULTS = {
    rate_by_the_count_so_far: ("hyperparameters", "an example of the step before changed"),
    queue_of_outputs: ("next-release", "The release of the next step moves by"),
    mean_in_an_object: ("next-release", "The release of the next step"),
    skips_rising_losses: ("release-count", "in the second of two steps"),
}


@pytest.mark.parametrize("step", LATER_FAULTS, ids=lambda step: step.__name__)
def test_what_one_step_leaves_to_the_next_is_compared_if_it_is_named(made, step):
    one = made(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    name, sentence = LATER_FAULTS[step]
    state = deque(torch.randn(16, 2), maxlen=16) if step is queue_of_outputs else []

    def replay_it(**options):
        return replay(
            lambda batch: step(one, state, batch),
            one.batch,
            optimizer=one.optimizer,
            model=one.model,
            **options,
        )

    before = list(state)
    result = replay_it(private_state=[state])
    assert names(result) == [name], str(result)
    assert sentence in result.findings[0].sentence
    assert list(state) == before
    if step is not skips_rising_losses:  # the losses of other batches do not change a first step
        with pytest.raises(dpaudit.InputError, match=r"name what it keeps .* private_state=\[...\]"):
            replay_it()


@pytest.mark.parametrize("period", [7, 25])
def test_a_count_that_is_not_named_is_no_finding(made, period):
    """A schedule in a closure changes a run in the middle of the replay, or all later ones."""
    one, count = made(), [0]

    def scheduled(made, inputs, targets):
        count[0] += 1
        is_late = count[0] % period == 0 if period < 10 else count[0] > period
        made.optimizer.param_groups[0]["lr"] = 0.05 if is_late else 0.1
        private_step(made, inputs, targets)

    assert "bit for bit, got another state" in refused(one, scheduled)
    count[0] = 0
    assert names(replayed(one, scheduled, published_state=[count])) == []


def test_attributes_of_the_model_are_noted_only_if_they_depend_on_examples(made):
    one = made()
    inner = one.model._module
    inner.register_buffer("unsaved", torch.zeros(8), persistent=False)
    inner.classes, inner.count = set(), 0

    def step(made, inputs, targets):
        private_step(made, inputs, targets)
        inner.classes.update(targets.tolist() if inputs.abs().max() < 100 else [5])
        inner.last, inner.unsaved = inputs[-1], inner.unsaved + inputs.mean(dim=0)
        inner.released, inner.count = {**made.model.state_dict()}, inner.count + 1

    result = replayed(one, step)
    assert names(result) == []
    [note] = result.notes
    assert note.split(" depends")[0] == "What the step writes to model.last, model.unsaved, model.classes"
    assert f"note: {note}" in str(result)
    assert (inner.classes, inner.count, hasattr(inner, "last")) == (set(), 0, False)


def test_an_example_is_changed_at_both_ends_of_the_batch(made):
    def limited(made, inputs, targets):
        kept = (inputs[:, :1] > 0).float().cumsum(dim=0) <= 2  # the first two; the last example changes none
        private_step(made, inputs * kept, targets)

    one = made()
    one.batch = torch.cat([one.batch[0][:, :1].abs(), one.batch[0][:, 1:]], dim=1), one.batch[1]
    one.batch[0][-1, 0] = -1.0
    result = replayed(one, limited)
    assert "coupled-examples" in names(result)
    assert "at the start of the batch" in result.findings[0].sentence


def test_a_gradient_after_the_noise_names_its_parameter(made):
    def adds_to_the_bias(made, inputs, targets):
        made.optimizer.zero_grad()
        cross_entropy(made.model(inputs), targets).backward()
        made.optimizer.pre_step()
        made.model._module[-1].bias.grad += 0.1 * inputs.mean()
        made.optimizer.original_optimizer.step()

    [finding] = replayed(made(), adds_to_the_bias).findings
    assert finding.name == "gradient-after-noise"
    assert finding.sentence.endswith(": 2.bias in update 1.")

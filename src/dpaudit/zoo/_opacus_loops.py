"""Training loops with Opacus as users write them, each with one thing wrong.

Loops are observed with default settings. Other scenarios are not run at all, because their settings show the
fault, or they are replayed: one step, on batches that differ in one example.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from dpaudit.diagnostics import Finding
from dpaudit.observers.opacus import check, observe, replay  # first: its error explains how to install Opacus
from dpaudit.zoo._evidence import DELTA, NOISE, Evidence, Scenario, paper_claim

# isort: split
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping

_FEATURES, _CLASSES = 8, 2
_NUM_EXAMPLES, _BATCH = 400, 20
_LARGE_BATCH = 100  # adaptive clipping needs ten times the noise multiplier
_NUM_STEPS = 120
_NUM_REPLAYED = 8
_Batch = tuple[Tensor, Tensor]


@dataclass
class _Private:
    """A training run that ``make_private`` prepared."""

    model: Any
    optimizer: Any
    loader: Any
    criterion: Any

    def step(self, batch: _Batch) -> None:
        """Run one correct step."""
        self.step_on(*batch)

    def step_on(self, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor] | None = None) -> None:
        """Run one step with this loss."""
        self.optimizer.zero_grad()
        (loss or self.criterion)(self.model(inputs), targets).backward()
        self.optimizer.step()


_Step = Callable[[_Private, _Batch], None]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_FEATURES, 16), nn.Tanh(), nn.Linear(16, _CLASSES))


def _examples(count: int) -> TensorDataset:
    inputs = torch.randn(count, _FEATURES)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def _private(
    seed: int,
    *,
    data: Callable[[], Dataset[Any]] = lambda: _examples(_NUM_EXAMPLES),
    model: Callable[[], nn.Module] = _model,
    loading: dict[str, Any] | None = None,
    engine: Callable[[], PrivacyEngine] = PrivacyEngine,
    **options: Any,
) -> _Private:
    """Prepare a small training run."""
    torch.manual_seed(seed)
    network, criterion = model(), nn.CrossEntropyLoss()
    wrapped, optimizer, *criteria, loader = engine().make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data(), **({"batch_size": _BATCH} | (loading or {}))),
        criterion=criterion,
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
        **options,
    )
    return _Private(
        wrapped, optimizer, loader, criteria[0] if criteria else criterion
    )  # ghost clipping adds one


# observed loops


def _observed(
    private: _Private, seed: int, step: _Step | None = None, *, batch_size: int = _BATCH
) -> Evidence:
    """Run a loop, by default a correct one, and return what its observer recorded."""
    with observe(
        private.optimizer,
        noise_multiplier=NOISE,
        sample_rate=batch_size / _NUM_EXAMPLES,
        num_steps=_NUM_STEPS,
        delta=DELTA,
        loader=private.loader,
        module=private.model,
        seed=seed,
    ) as recorder:
        batches = itertools.chain.from_iterable(itertools.repeat(private.loader))
        while recorder.num_done < _NUM_STEPS:
            batch = next(batches)
            if step is None:
                private.step(batch)
            else:
                step(private, batch)
    return Evidence(claim=recorder.claim, num_steps=_NUM_STEPS, recorder=recorder)


SCENARIOS: dict[str, Scenario] = {}


def _scenario(name: str) -> Callable[[Scenario], Scenario]:
    """Register the scenario of an entry, without the warnings of Opacus and torch that every user sees."""

    def registered(scenario: Scenario) -> Scenario:
        def quiet(is_broken: bool, seed: int) -> Evidence:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return scenario(is_broken, seed)

        SCENARIOS[name] = quiet
        return quiet

    return registered


@_scenario("weighted-sampler")
def weighted_sampler(is_broken: bool, seed: int) -> Evidence:
    """Draw batches with replacement and with weights, and account for them as Poisson sampling."""
    private = _private(seed)
    if not is_broken:
        return _observed(private, seed)
    data = private.loader.dataset
    weights = torch.where(data.tensors[1] == 1, 3.0, 1.0)
    sampler = WeightedRandomSampler(weights.tolist(), num_samples=_NUM_EXAMPLES, replacement=True)
    private.loader = DataLoader(data, batch_size=_BATCH, sampler=sampler)
    return _observed(private, seed)


@_scenario("same-order")
def same_order(is_broken: bool, seed: int) -> Evidence:
    """Shuffle the data once, and use the same batches in every epoch."""
    private = _private(seed)
    if is_broken:
        data = private.loader.dataset
        order = torch.randperm(_NUM_EXAMPLES).tolist()
        private.loader = DataLoader(Subset(data, order), batch_size=_BATCH)
    return _observed(private, seed)


@_scenario("two-batches-per-step")
def two_batches(is_broken: bool, seed: int) -> Evidence:
    """Sum two Poisson batches in each step, and account for one of them."""
    private, numbers = _private(seed), itertools.count()

    def half_step(run: _Private, batch: _Batch) -> None:
        run.optimizer.signal_skip_step(do_skip=next(numbers) % 2 == 0)
        run.step(batch)

    return _observed(private, seed, half_step if is_broken else None)


@_scenario("ghost-plain-loss")
def plain_loss(is_broken: bool, seed: int) -> Evidence:
    """Use ghost clipping with the original loss, whose backward pass clips nothing."""
    private = _private(seed, grad_sample_mode="ghost")
    if is_broken:
        private.criterion = nn.CrossEntropyLoss()
    return _observed(private, seed)


@_scenario("ghost-adaptive")
def adaptive_ghost(is_broken: bool, seed: int) -> Evidence:
    """Use adaptive ghost clipping of Opacus 1.6.0, which multiplies the mean loss by clipping coefficients.

    ``DPLossFastGradientAdaptiveClipping`` does not ask the criterion for the losses of single examples, as
    the loss of ghost clipping does. The twin does. Some examples have long gradients.
    """

    def data() -> Dataset[Any]:
        inputs, targets = _examples(_NUM_EXAMPLES).tensors
        inputs[::_BATCH] *= 100
        targets[::_BATCH] = torch.arange(_NUM_EXAMPLES // _BATCH) % _CLASSES
        return TensorDataset(inputs, targets)

    private = _private(
        seed,
        data=data,
        engine=PrivacyEngineAdaptiveClipping,
        loading={"batch_size": _LARGE_BATCH},
        grad_sample_mode="ghost",
        min_clipbound=0.01,
    )
    if not is_broken:
        private.criterion.criterion.reduction = "none"
    return _observed(private, seed, batch_size=_LARGE_BATCH)


@_scenario("rows-per-example")
def repeated_forward(is_broken: bool, seed: int) -> Evidence:
    """Pass every example through the model twice, as two rows that are clipped separately."""
    private = _private(seed)

    def step(run: _Private, batch: _Batch) -> None:
        inputs, targets = batch
        views = torch.cat([inputs, inputs + 0.1 * torch.randn_like(inputs)])
        run.step_on(views, torch.cat([targets, targets]))

    return _observed(private, seed, step if is_broken else None)


# settings


def _settings(private: _Private, *, notes: str | None = None) -> Evidence:
    """Check the settings without running a step; a note that starts with ``notes`` counts as a finding."""
    report = check(private.optimizer, module=private.model, loader=private.loader)
    noted = [note for note in report.notes if notes is not None and note.startswith(notes)]
    findings = *report.findings, *(Finding.certain("data-set-size", note) for note in noted)
    return Evidence(claim=paper_claim(), num_steps=0, certain=findings)


@_scenario("poisson-off")
def fixed_batches(is_broken: bool, seed: int) -> Evidence:
    """Turn Poisson sampling off, with an accountant that assumes it."""
    return _settings(_private(seed, poisson_sampling=not is_broken))


@_scenario("oversampled-class")
def oversampled_class(is_broken: bool, seed: int) -> Evidence:
    """List the examples of a rare class several times."""

    def data() -> Dataset[Any]:
        examples = _examples(_NUM_EXAMPLES)
        rare = Subset(examples, torch.nonzero(examples.tensors[1] == 1).flatten().tolist())
        return ConcatDataset([examples, rare, rare]) if is_broken else examples

    return _settings(_private(seed, data=data))


@_scenario("noise-seed-in-code")
def seed_in_code(is_broken: bool, seed: int) -> Evidence:
    """Seed the generator of the noise with a constant."""
    generator = torch.Generator().manual_seed(42) if is_broken else None
    return _settings(_private(seed, noise_generator=generator))


@_scenario("divisor-from-size")
def size_in_divisor(is_broken: bool, seed: int) -> Evidence:
    """Let Opacus compute rate and divisor from a number of examples at which both change."""
    private = _private(seed)
    if not is_broken:
        private.optimizer.expected_batch_size = _BATCH - 1  # a number that does not depend on the data
    return _settings(private, notes="The mechanism depends on the number of examples")


# replayed steps


def _replayed(private: _Private, step: _Step | None, *, non_finite: bool = False, **named: Any) -> Evidence:
    """Replay one step on neighboring batches; a non-finite release counts only if asked for."""
    inputs = torch.randn(_NUM_REPLAYED, _FEATURES)
    batch = inputs, torch.arange(_NUM_REPLAYED) % _CLASSES
    replayed = private.step if step is None else partial(step, private)
    result = replay(replayed, batch, optimizer=private.optimizer, model=private.model, **named)
    findings = result.non_finite if non_finite else result.findings
    return Evidence(claim=paper_claim(), num_steps=1, certain=findings)


def _replayed_step(name: str) -> Callable[[_Step], _Step]:
    """Register a scenario that replays this step, or the correct one."""

    def registered(step: _Step) -> _Step:
        _scenario(name)(lambda is_broken, seed: _replayed(_private(seed), step if is_broken else None))
        return step

    return registered


@_replayed_step("class-weights")
def _class_weights(run: _Private, batch: _Batch) -> None:
    counts = torch.bincount(batch[1], minlength=_CLASSES)
    weight = 1 / counts.clamp(min=1).float()
    run.step_on(*batch, lambda logits, y: cross_entropy(logits, y, weight=weight))


@_replayed_step("contrastive-loss")
def _contrastive(run: _Private, batch: _Batch) -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        similar = torch.softmax(logits @ logits.T, dim=1)
        return cross_entropy(logits, targets) - similar.diagonal().log().mean()

    run.step_on(*batch, loss)


@_replayed_step("divided-by-batch")
def _divided_by_batch(run: _Private, batch: _Batch) -> None:
    run.optimizer.expected_batch_size = len(batch[0])
    run.step(batch)


@_replayed_step("rate-from-loss")
def _rate_from_loss(run: _Private, batch: _Batch) -> None:
    with torch.no_grad():
        loss = float(cross_entropy(run.model(batch[0]), batch[1]))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1 * loss
    run.step(batch)


@_replayed_step("raw-moments")
def _raw_moments(run: _Private, batch: _Batch) -> None:
    run.step(batch)
    for parameter in run.optimizer.params:
        state = run.optimizer.original_optimizer.state[parameter]
        state["second_moment"] = 0.9 * state.get("second_moment", 0.0) + parameter.summed_grad**2


@_replayed_step("small-batch-skipped")
def _skip_small(run: _Private, batch: _Batch) -> None:
    if len(batch[0]) >= _NUM_REPLAYED:
        run.step(batch)


class _Standardized(nn.Module):
    """Model that standardizes its inputs with running statistics, which are buffers."""

    def __init__(self, *, is_tracked: bool) -> None:
        super().__init__()
        self.rest, self.is_tracked = _model(), is_tracked
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(_FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.rest(inputs - self.mean)
        if self.is_tracked and self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(dim=0)
        return outputs


@_scenario("running-statistics")
def running_statistics(is_broken: bool, seed: int) -> Evidence:
    """Update a running mean of the inputs, which is saved with the model."""
    private = _private(seed, model=lambda: _Standardized(is_tracked=is_broken))
    return _replayed(private, None)


@_scenario("second-optimizer")
def second_optimizer(is_broken: bool, seed: int) -> Evidence:
    """Train an added layer with an optimizer of its own, without clipping and noise."""
    private, layer = _private(seed), nn.Linear(_CLASSES, _CLASSES)
    other = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(run: _Private, batch: _Batch) -> None:
        other.zero_grad()
        run.step_on(*batch, lambda logits, targets: cross_entropy(layer(logits), targets))
        other.step()

    return _replayed(private, step if is_broken else None, published_state=[layer])


class _NanSafe(DPOptimizer):  # type: ignore[misc]
    """Optimizer that removes non-finite gradients before they are clipped."""

    def clip_and_accumulate(self) -> None:
        rows = torch.cat([leaf.reshape(len(leaf), -1) for leaf in self.grad_samples], dim=1)
        is_finite = rows.isfinite().all(dim=1)
        for parameter in self.params:
            rows_to_keep = is_finite.view(-1, *[1] * parameter.dim())
            parameter.grad_sample = torch.where(rows_to_keep, parameter.grad_sample, 0.0)
        super().clip_and_accumulate()


@_scenario("non-finite-gradient")
def non_finite_gradient(is_broken: bool, seed: int) -> Evidence:
    """Multiply a non-finite gradient by its clipping factor, as Opacus 1.6 does."""
    private = _private(seed)
    if not is_broken:
        private.optimizer.__class__ = _NanSafe
    return _replayed(private, None, non_finite=True)


@_scenario("skip-if-non-finite")
def skipped_if_non_finite(is_broken: bool, seed: int) -> Evidence:
    """Skip the step if the loss is not finite, as a gradient scaler does."""
    private = _private(seed)
    private.optimizer.__class__ = _NanSafe

    def step(run: _Private, batch: _Batch) -> None:
        with torch.no_grad():
            loss = cross_entropy(run.model(batch[0]), batch[1])
        if loss.isfinite():
            run.step(batch)

    return _replayed(private, step if is_broken else None, non_finite=True)

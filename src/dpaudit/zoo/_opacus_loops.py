"""Training loops with Opacus as users write them, each with one thing wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from dpaudit.zoo._evidence import Scenario
from dpaudit.zoo._opacus import (  # before Opacus: its error message explains how to install it
    BATCH,
    CLASSES,
    FEATURES,
    GHOST,
    NUM_EXAMPLES,
    NUM_REPLAYED,
    Batch,
    Private,
    PrivateTraining,
    assign,
    examples,
    observed,
    observed_phases,
    replayed_step,
    settings,
    small_model,
)

# isort: split
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping

# batches


def _sample_by_weight(private: Private) -> None:
    data = private.loader.dataset
    weights = torch.where(data.tensors[1] == 1, 3.0, 1.0)
    sampler = WeightedRandomSampler(weights.tolist(), num_samples=NUM_EXAMPLES, replacement=True)
    private.loader = DataLoader(data, batch_size=BATCH, sampler=sampler)


def _shuffle_once(private: Private) -> None:
    order = torch.randperm(NUM_EXAMPLES).tolist()
    private.loader = DataLoader(Subset(private.loader.dataset, order), batch_size=BATCH)


def _use_original_loader(private: Private) -> None:
    private.batches = DataLoader(private.loader.dataset, batch_size=BATCH, shuffle=True)


def _skip_unbalanced(private: Private, batch: Batch) -> None:
    if batch[1].float().mean() > 0.35:
        private.step(batch)


def _sum_two_batches(private: Private) -> None:
    numbers, step = itertools.count(), private.step

    def half_step(batch: Batch) -> None:
        private.optimizer.signal_skip_step(do_skip=next(numbers) % 2 == 0)
        step(batch)

    private.step = half_step  # type: ignore[assignment]


def _pass_twice(private: Private, batch: Batch) -> None:
    inputs, targets = batch
    views = torch.cat([inputs, inputs + 0.1 * torch.randn_like(inputs)])
    private.step((views, torch.cat([targets, targets])))


def _with_long_gradients() -> Dataset[Any]:
    inputs, targets = examples().tensors
    inputs[::BATCH] *= 100
    targets[::BATCH] = torch.arange(NUM_EXAMPLES // BATCH) % CLASSES
    return TensorDataset(inputs, targets)


def _with_repeated_class() -> Dataset[Any]:
    data = examples()
    rare = Subset(data, torch.nonzero(data.tensors[1] == 1).flatten().tolist())
    return ConcatDataset([data, rare, rare])


def _shrink_norm(private: Private, *, per_part: bool) -> None:
    """Split batches into two parts, and shrink the clipping norm after each part or after each step."""
    step, optimizer = private.step, private.optimizer

    def step_in_parts(batch: Batch) -> None:
        middle = len(batch[0]) // 2
        for is_last, half in ((False, slice(middle)), (True, slice(middle, None))):
            optimizer.signal_skip_step(do_skip=not is_last)
            step((batch[0][half], batch[1][half]))
            if per_part or is_last:
                optimizer.max_grad_norm *= 0.99

    private.step = step_in_parts  # type: ignore[assignment]


def _replace_accountants(private: Private) -> None:
    def begin_phase() -> None:
        rate = 1 / len(private.loader)
        private.optimizer.attach_step_hook(RDPAccountant().get_optimizer_hook_fn(sample_rate=rate))

    private.begin_phase = begin_phase


# steps


def _weigh_classes(private: Private, batch: Batch) -> None:
    counts = torch.bincount(batch[1], minlength=CLASSES)
    weight = 1 / counts.clamp(min=1).float()
    private.step(batch, lambda logits, y: cross_entropy(logits, y, weight=weight))


def _contrast(private: Private, batch: Batch) -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        similar = torch.softmax(logits @ logits.T, dim=1)
        return cross_entropy(logits, targets) - similar.diagonal().log().mean()

    private.step(batch, loss)


def _divide_by_batch(private: Private, batch: Batch) -> None:
    private.optimizer.expected_batch_size = len(batch[0])
    private.step(batch)


def _update_in_backward(private: Private) -> None:
    def update(parameter: Any) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.01)

    for parameter in private.optimizer.params:
        parameter.register_post_accumulate_grad_hook(update)


class _Masked(torch.optim.SGD):
    """Optimizer that updates only where the sum before the noise has the sign of the release."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad * (parameter.grad * parameter.summed_grad > 0)
        super().step(closure)


class _Limited(torch.optim.SGD):
    """Optimizer of its own that limits the release, which is correct."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad.clamp(-1, 1)
        super().step(closure)


def _loss_of(private: Private, batch: Batch) -> Tensor:
    with torch.no_grad():
        return cross_entropy(private.model(batch[0]), batch[1])


def _set_rate_from_loss(private: Private, batch: Batch) -> None:
    loss = float(_loss_of(private, batch))
    for group in private.optimizer.param_groups:
        group["lr"] = 0.1 * loss
    private.step(batch)


def _keep_raw_moments(private: Private, batch: Batch) -> None:
    private.step(batch)
    for parameter in private.optimizer.params:
        state = private.optimizer.original_optimizer.state[parameter]
        state["second_moment"] = 0.9 * state.get("second_moment", 0.0) + parameter.summed_grad**2


def _skip_small(private: Private, batch: Batch) -> None:
    if len(batch[0]) >= NUM_REPLAYED:
        private.step(batch)


def _skip_non_finite(private: Private, batch: Batch) -> None:
    if _loss_of(private, batch).isfinite():
        private.step(batch)


def _add_layer(private: Private) -> None:
    private.published = [nn.Linear(CLASSES, CLASSES)]


def _train_added_layer(private: Private, batch: Batch) -> None:
    [layer] = private.published
    other = torch.optim.SGD(layer.parameters(), lr=0.1)
    other.zero_grad()
    private.step(batch, lambda logits, targets: cross_entropy(layer(logits), targets))
    other.step()


class _Standardized(nn.Module):
    """Model that standardizes its inputs with running statistics, which are buffers."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.is_tracked = small_model(), False
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.rest(inputs - self.mean)
        if self.is_tracked and self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(dim=0)
        return outputs


class _Attending(nn.Module):
    """Model that weighs its features by a softmax, along the features or along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.rest, self.dim = nn.Linear(FEATURES, FEATURES), small_model(), 1

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rest(inputs * self.scores(inputs).softmax(self.dim))  # type: ignore[no-any-return]


class _NanSafe(DPOptimizer):  # type: ignore[misc]
    """Optimizer that removes non-finite gradients before they are clipped."""

    def clip_and_accumulate(self) -> None:
        rows = torch.cat([leaf.reshape(len(leaf), -1) for leaf in self.grad_samples], dim=1)
        is_finite = rows.isfinite().all(dim=1)
        for parameter in self.params:
            rows_to_keep = is_finite.view(-1, *[1] * parameter.dim())
            parameter.grad_sample = torch.where(rows_to_keep, parameter.grad_sample, 0.0)
        super().clip_and_accumulate()


_observed, _checked, _replayed, _replayed_non_finite = (
    partial(PrivateTraining, judge=judge)
    for judge in (observed, settings, replayed_step, partial(replayed_step, non_finite=True))
)
_nan_safe = assign("optimizer.__class__", _NanSafe)

SCENARIOS: Mapping[str, Scenario] = {
    "batch-softmax": _observed(options={"model": _Attending}, fault=assign("model._module.dim", 0)),
    "weighted-sampler": _observed(fault=_sample_by_weight),
    "same-order": _observed(fault=_shuffle_once),
    "original-loader": _observed(fault=_use_original_loader),
    "unbalanced-skipped": _observed(step=_skip_unbalanced),
    "two-batches-per-step": _observed(fault=_sum_two_batches),
    "ghost-plain-loss": _observed(options=GHOST, fault=assign("criterion", nn.CrossEntropyLoss())),
    "ghost-adaptive": _observed(
        options={
            **GHOST,
            "data": _with_long_gradients,
            "engine": PrivacyEngineAdaptiveClipping,
            "batch_size": 100,  # adaptive clipping needs ten times the noise multiplier
            "min_clipbound": 0.01,
        },
        # Opacus 1.6.0 multiplies the mean loss by clipping coefficients: it does not ask the criterion for
        # the losses of single examples, as the loss of ghost clipping does
        fix=assign("criterion.criterion.reduction", "none"),
    ),
    "rows-per-example": _observed(step=_pass_twice),
    "poisson-off": _checked(broken={"poisson_sampling": False}),
    "oversampled-class": _checked(broken={"data": _with_repeated_class}),
    "noise-seed-in-code": _checked(broken={"noise_generator": torch.Generator().manual_seed(42)}),
    "divisor-from-size": PrivateTraining(
        judge=partial(settings, notes="The mechanism depends on the number of examples"),
        fix=assign("optimizer.expected_batch_size", BATCH - 1),  # does not depend on the data
    ),
    "class-weights": _replayed(step=_weigh_classes),
    "contrastive-loss": _replayed(step=_contrast),
    "divided-by-batch": _replayed(step=_divide_by_batch),
    "rate-from-loss": _replayed(step=_set_rate_from_loss),
    "raw-moments": _replayed(step=_keep_raw_moments),
    "small-batch-skipped": _replayed(step=_skip_small),
    "running-statistics": _replayed(
        options={"model": _Standardized}, fault=assign("model._module.is_tracked", True)
    ),
    "second-optimizer": _replayed(fault=_add_layer, fix=_add_layer, step=_train_added_layer),
    "norm-within-batch": _observed(
        fault=partial(_shrink_norm, per_part=True), fix=partial(_shrink_norm, per_part=False)
    ),
    "update-masked": _observed(options={"optimizer": _Limited}, broken={"optimizer": _Masked}),
    "phases-reseeded": PrivateTraining(
        judge=observed_phases, fault=assign("begin_phase", partial(torch.manual_seed, 42))
    ),
    "accountant-replaced": PrivateTraining(judge=observed_phases, fault=_replace_accountants),
    "update-in-backward": _observed(fault=_update_in_backward),
    "non-finite-gradient": _replayed_non_finite(fix=_nan_safe),  # as in Opacus 1.6
    "skip-if-non-finite": _replayed_non_finite(fault=_nan_safe, fix=_nan_safe, step=_skip_non_finite),
}

"""Training runs with Opacus 1.6.0, one model after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from dpaudit.training import DPSGD, SGD
from dpaudit.training.data import Dataset

__all__ = ["train_with_opacus"]


def train_with_opacus(model: nn.Module, data: Dataset, settings: DPSGD, *, ghost: bool) -> nn.Module:
    """Train with Opacus as its engine does, but without its loader, which would add time."""
    warnings.simplefilter("ignore")  # its hooks emit several per step
    hooked, optimizer, loss = _parts(model, data, settings, ghost)
    for _ in range(settings.num_steps):
        indices = (torch.rand(len(data)) < settings.sample_rate).nonzero().view(-1)
        inputs, targets = data.at(indices)
        optimizer.zero_grad()
        loss(hooked(inputs), targets).backward()
        optimizer.step()
    return model


def _parts(
    model: nn.Module, data: Dataset, settings: DPSGD, ghost: bool
) -> tuple[nn.Module, Any, Callable[..., Any]]:
    assert isinstance(settings.optimizer, SGD)
    norm, loss = settings.max_grad_norm, nn.CrossEntropyLoss()
    hooked: Any = (
        GradSampleModuleFastGradientClipping(model, max_grad_norm=norm, use_ghost_clipping=True)
        if ghost
        else GradSampleModule(model)
    )
    kind: Any = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    optimizer = kind(
        torch.optim.SGD(hooked.parameters(), lr=settings.optimizer.learning_rate),
        noise_multiplier=settings.noise_multiplier,
        max_grad_norm=norm,
        expected_batch_size=round(settings.sample_rate * len(data)),
        loss_reduction="mean",
    )
    return hooked, optimizer, DPLossFastGradientClipping(hooked, optimizer, loss) if ghost else loss

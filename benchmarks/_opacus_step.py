"""One step of DP-SGD with Opacus 1.6.0, which is installed in a separate environment."""

from __future__ import annotations

import warnings
from typing import Any

from _cases import CLIP, LEARNING_RATE, Case, Step, fixed_indices
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn, optim

__all__ = ["opacus_model", "opacus_step"]


def opacus_step(case: Case) -> Step:
    """Return a step that computes per-example gradients with hooks, the default of Opacus."""
    return _prepare(case, noise_multiplier=1.0)[1]


def opacus_model(case: Case) -> nn.Module:
    """Return the model after one step without noise, to check that the step equals ours."""
    model, step = _prepare(case, noise_multiplier=0.0)
    step()
    return model


def _prepare(case: Case, noise_multiplier: float) -> tuple[nn.Module, Step]:
    """Return a model and its step, prepared as the Opacus engine does, but without its loader."""
    warnings.simplefilter("ignore")  # its hooks emit several per step
    model = case.model()
    hooked: Any = GradSampleModule(model, loss_reduction="mean", strict=True)
    optimizer: Any = DPOptimizer(
        optim.SGD(hooked.parameters(), lr=LEARNING_RATE),
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
        expected_batch_size=case.batch_size,
        loss_reduction="mean",
        secure_mode=False,
    )
    data, indices = case.data(), fixed_indices(case.batch_size)

    def step() -> None:
        inputs, targets = data.at(indices)
        optimizer.zero_grad()
        nn.functional.cross_entropy(hooked(inputs), targets).backward()
        optimizer.step()

    return model, step

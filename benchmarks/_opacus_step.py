"""One step of DP-SGD by Opacus 1.6.0, which lives in an environment of its own."""

from __future__ import annotations

import warnings
from typing import Any

from _cases import CLIP, LEARNING_RATE, Case, Step, fixed_indices
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn, optim

__all__ = ["opacus_model", "opacus_step"]


def opacus_step(case: Case) -> Step:
    """With the per-example gradients of hooks, which is what Opacus does unless told otherwise."""
    return _prepare(case, noise_multiplier=1.0)[1]


def opacus_model(case: Case) -> nn.Module:
    """The model after one step without noise: to see that the step is the same as ours."""
    model, step = _prepare(case, noise_multiplier=0.0)
    step()
    return model


def _prepare(case: Case, noise_multiplier: float) -> tuple[nn.Module, Step]:
    """What Opacus' engine makes of a model and an optimizer; without its loader, which takes time too."""
    warnings.simplefilter("ignore")  # its hooks give several a step
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

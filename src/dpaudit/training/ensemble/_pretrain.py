"""Weights to start from: worst-case initialisation (Annamalai and De Cristofaro 2024, arXiv:2405.14106)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpaudit import _validate
from dpaudit.training._seeds import Seeds, generator, initialize
from dpaudit.training.data import Dataset
from dpaudit.training.gradients import Loss, cross_entropy, flat_parameters

__all__ = ["pretrained_weights"]


def pretrained_weights(
    build: Callable[[], nn.Module],
    held_out: Dataset,
    *,
    num_steps: int = 1_000,
    batch_size: int = 64,
    learning_rate: float = 0.1,
    seed: int = 0,
    loss: Loss = cross_entropy,
) -> Tensor:
    """The flat weights of a model trained on ``held_out``, without privacy, by plain gradient descent.

    Near a minimum the gradients of ordinary examples are small and the canary's stands out. The examples have
    to be others than those that are trained on privately: the claim does not cover these.
    """
    _validate.whole("num_steps", num_steps)
    size = min(_validate.whole("batch_size", batch_size), len(held_out))
    _validate.positive("learning_rate", learning_rate)
    seeds = Seeds.of(seed)
    model, rng = initialize(build, seeds.initialization), generator(seeds.sampling)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(num_steps):
        inputs, targets = held_out.at(torch.randint(len(held_out), (size,), generator=rng))
        optimizer.zero_grad()
        loss(model(inputs), targets).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat_parameters(model)

"""Steps that are made twice with the same noise, on data that differ in one example."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit.observers._residuals import clipped_sum
from dpaudit.observers.step import replay_step
from dpaudit.stats._types import FloatArray
from dpaudit.zoo._evidence import Evidence, Replay
from dpaudit.zoo.specimens._claim import NOISE, papers_claim

__all__ = ["batch_norm", "floor_batch", "microbatch", "replayed"]


def replayed(
    release: Callable[[Any], Any],
    batch: Any,
    neighbours: Iterable[Any],
    *,
    reseed: Callable[[], object] = lambda: None,
    max_grad_norm: float = 1.0,
    batch_size: float | None = None,
) -> Evidence:
    """What one example does to a release, beside the claim that the noise is made for."""
    found = replay_step(
        release,
        batch,
        neighbours,
        reseed=reseed,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
    )
    sentence = str(found)
    replay = Replay(f"{sentence[0].upper()}{sentence[1:]}.", found.is_violation)
    return Evidence(claim=papers_claim(), num_steps=1, replay=replay)


def _noise(seed: int, size: int) -> FloatArray:
    """The same again for the same seed."""
    drawn: FloatArray = NOISE * np.random.default_rng(seed).standard_normal(size)
    return drawn


def microbatch(is_broken: bool, seed: int) -> Evidence:
    """Two examples a microbatch, whose mean is clipped; one of them outweighs the other."""
    size = 2 if is_broken else 1
    rng = np.random.default_rng([seed, 1])
    rows = rng.standard_normal((8, 16))
    rows[1] = -100 * rows[0]
    without = rows.copy()
    without[1] = 0  # no gradient: the example is not there

    def release(batch: FloatArray) -> FloatArray:
        means = batch.reshape(-1, size, batch.shape[1]).mean(axis=1)
        return clipped_sum(means, 1.0) + _noise(seed, batch.shape[1])

    return replayed(release, rows, [without])


def floor_batch(is_broken: bool, seed: int) -> Evidence:
    """The noisy sum over ``int(rate * size)``, where one example more makes that one more."""
    rate, size, expected = 0.1, 99, 10
    direction = np.zeros(16)
    direction[seed % 16] = 1.0
    batch = np.tile(direction, (expected, 1))

    def release(sampled: tuple[FloatArray, int]) -> FloatArray:
        rows, num_examples = sampled
        divisor = int(rate * num_examples) if is_broken else expected
        return (clipped_sum(rows, 1.0) + _noise(seed, rows.shape[1])) / divisor

    more = np.concatenate([batch, -batch[:1]])
    neighbours = [(batch, size + 1), (more, size + 1)]  # it is drawn, or it is not
    return replayed(release, (batch, size), neighbours, batch_size=expected)


def batch_norm(is_broken: bool, seed: int) -> Evidence:
    """Activations are normalized over the batch, or over the features of each example."""
    torch.manual_seed(seed)
    norm: nn.Module = nn.BatchNorm1d(16) if is_broken else nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 2))
    inputs = torch.randn(16, 8)
    inputs[-1] *= 100
    targets = torch.randint(2, (16,))
    small = 0.01  # so that every gradient is clipped

    def release(count: int) -> FloatArray:
        rows = _per_example(model, inputs[:count], targets[:count]).double().numpy()
        return clipped_sum(rows, small) + small * _noise(seed, rows.shape[1])

    return replayed(release, 16, [15], max_grad_norm=small)


def _per_example(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the loss of each example of the batch, which is run as a whole."""
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([part.reshape(-1) for part in grad]) for grad in grads])

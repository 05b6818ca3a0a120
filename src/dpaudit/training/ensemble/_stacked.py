"""DP-SGD of many models in shared tensor operations: batches, private sums and gradient descent.

This is the engine for models with linear layers and convolutions. All batches of a training run are drawn
before its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dpaudit._types import IntArray
from dpaudit.training._private_sum import GaussianSum, PrivateSum
from dpaudit.training._seeds import Seeds, generator
from dpaudit.training._settings import DPSGD, SGD
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble._layers import Stack, StackedRows
from dpaudit.training.gradients import Loss


def train_stacked(
    stack: Stack,
    flat: Tensor,
    data: Dataset,
    batches: Sequence[Sequence[IntArray]],
    *,
    seeds: Sequence[Seeds],
    settings: DPSGD,
    mechanism: PrivateSum,
    loss: Loss,
    expected_batch_size: float,
) -> Tensor:
    """Train the models with weights ``flat`` in place; return the weights."""
    assert isinstance(settings.optimizer, SGD)
    noise = [generator(each.noise, flat.device) for each in seeds]
    optimizer, total = StackedSGD(settings.optimizer, flat), torch.empty_like(flat)
    squares = stack.squares(data.inputs)
    for table, sizes in padded_batches(batches):
        indices = table.view(-1).to(flat.device)
        inputs, targets = data.at(indices)
        real = (torch.arange(table.shape[1]) < sizes[:, None]).view(-1).to(flat.device)
        batch_squares = None if squares is None else squares.index_select(0, indices)
        rows = stack.rows(flat, inputs, targets, real=real, loss=loss, squares=batch_squares)
        optimizer.step(private_sum(mechanism, rows, sizes, noise, total), expected_batch_size)
    return flat


def private_sum(
    mechanism: PrivateSum,
    rows: StackedRows,
    sizes: Tensor,
    generators: Sequence[torch.Generator],
    out: Tensor,
) -> Tensor:
    """Fill ``out`` with the noisy sum of every model, with noise from the model's own RNG."""
    if type(mechanism).finish is GaussianSum.finish:  # a plain sum can start from its noise
        _fill_with_noise(mechanism, generators, out)
        mechanism.add([rows], out)
        return out
    mechanism.add([rows], out.zero_())
    for total, size, rng in zip(out, sizes.tolist(), generators, strict=True):
        finished = mechanism.finish(total, size)
        total.copy_(finished + mechanism.noise(finished, rng))
    return out


def _fill_with_noise(mechanism: PrivateSum, generators: Sequence[torch.Generator], out: Tensor) -> None:
    if isinstance(mechanism, GaussianSum) and type(mechanism).noise is GaussianSum.noise:
        scale = mechanism.noise_multiplier * mechanism.max_grad_norm
        for row, generator in zip(out, generators, strict=True):  # in place, to save a pass over memory
            row.normal_(std=scale, generator=generator)
        return
    for row, generator in zip(out, generators, strict=True):
        row.copy_(mechanism.noise(row, generator))


class StackedSGD:
    """SGD as in torch, for weights with one row per model."""

    def __init__(self, optimizer: SGD, flat: Tensor) -> None:
        self._optimizer, self._flat = optimizer, flat
        self._velocity: Tensor | None = None

    def step(self, total: Tensor, expected_batch_size: float) -> None:
        """Update with the gradient ``total / expected_batch_size``; ``total`` may be overwritten."""
        settings = self._optimizer
        if settings.momentum == 0.0 and settings.weight_decay == 0.0:
            self._flat.add_(total, alpha=-settings.learning_rate / expected_batch_size)
            return
        gradient = total.div_(expected_batch_size)
        if settings.weight_decay:
            gradient.add_(self._flat, alpha=settings.weight_decay)
        if settings.momentum:
            if self._velocity is None:
                self._velocity = gradient.clone()
            else:
                self._velocity.mul_(settings.momentum).add_(gradient)
            gradient = self._velocity
        self._flat.add_(gradient, alpha=-settings.learning_rate)


def drawn_batches(*, num_examples: int, present: bool, settings: DPSGD, seeds: Seeds) -> list[IntArray]:
    """Return the indices of the batch of every step. The index of the canary is ``num_examples``.

    This is Poisson sampling, as the accounting assumes. The coins of all steps form one long sequence, of
    which only the gaps between heads are drawn: the cost grows with the batches, not with the data. The
    canary's coins are drawn separately, so that the rest of a batch does not depend on its presence.
    """
    others, canary = np.random.SeedSequence(seeds.sampling).spawn(2)
    heads = _heads(num_examples * settings.num_steps, settings.sample_rate, np.random.default_rng(others))
    ends = np.searchsorted(heads, num_examples * np.arange(1, settings.num_steps))
    batches = [heads_of_step % num_examples for heads_of_step in np.split(heads, ends)]
    if present:
        joins = np.random.default_rng(canary).random(settings.num_steps) < settings.sample_rate
        batches = [
            np.append(batch, num_examples) if join else batch
            for batch, join in zip(batches, joins, strict=True)
        ]
    return batches


def _heads(num_coins: int, probability: float, rng: np.random.Generator) -> IntArray:
    """Return the indices of heads in a sequence of coin flips."""
    if probability == 1.0:
        return np.arange(num_coins)
    chunks, last = [], -1
    while last < num_coins - 1:
        mean = (num_coins - 1 - last) * probability
        # almost always enough gaps to reach the end; otherwise, more are drawn
        gaps = rng.geometric(probability, size=int(mean + 5 * mean**0.5) + 1)
        chunks.append(last + np.cumsum(gaps))
        last = int(chunks[-1][-1])
    heads = np.concatenate([np.empty(0, np.int64), *chunks])
    return heads[heads < num_coins]


class DrawnBatches:
    """Sampling scheme that returns batches drawn in advance; each training run needs its own."""

    def __init__(self, batches: Sequence[IntArray]) -> None:
        self._batches = iter(batches)

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Return the batch of the next step."""
        return torch.from_numpy(next(self._batches))


def padded_batches(models: Sequence[Sequence[IntArray]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for every step the batches of all models as rows of one table, and the size of each batch.

    Rows are padded with index 0 to the length of the longest.
    """
    for batches in zip(*models, strict=True):
        sizes = np.array([len(batch) for batch in batches])
        table = np.zeros((len(batches), max(int(sizes.max()), 1)), np.int64)
        table[np.arange(table.shape[1]) < sizes[:, None]] = np.concatenate(batches)
        yield torch.from_numpy(table), torch.from_numpy(sizes)

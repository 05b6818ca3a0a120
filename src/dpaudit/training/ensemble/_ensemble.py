"""Many models trained with DP-SGD, with and without a canary: Algorithm 1 of Nasr et al. 2023.

Models with linear layers and convolutions are trained in shared tensor operations: batches, private sums and
gradient descent. All batches of a training run are drawn before its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.errors import InputError
from dpaudit.training._settings import DPSGD, SGD, Adam, GaussianSum, PrivateSum, Seeds, generator, initialize
from dpaudit.training._training import Training
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble._layers import Stack, StackedRows
from dpaudit.training.ensemble._models import Example, Score, TrainedModels, joined, log_odds, pattern_of
from dpaudit.training.gradients import Loss, cross_entropy, flat_parameters, num_parameters


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
    noise = [generator(each.noise, flat.device) for each in seeds]
    weights, total = nn.Parameter(flat, requires_grad=False), torch.empty_like(flat)
    optimizer = settings.optimizer.build([weights])  # updates each number alone, and thus each model
    squares = stack.squares(data.inputs)
    for table, sizes in padded_batches(batches):
        indices = table.view(-1).to(flat.device)
        inputs, targets = data.at(indices)
        real = (torch.arange(table.shape[1]) < sizes[:, None]).view(-1).to(flat.device)
        batch_squares = None if squares is None else squares.index_select(0, indices)
        rows = stack.rows(flat, inputs, targets, real=real, loss=loss, squares=batch_squares)
        weights.grad = private_sum(mechanism, rows, sizes, noise, total).div_(expected_batch_size)
        optimizer.step()
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


# Measured by benchmarks/ensemble.py: fewer models call torch more often, more do not fit into the caches.
_DENSE_MODELS, _CONVOLUTIONAL_MODELS = 32, 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Ensemble:
    """Models of the same architecture, each trained from its own seed on ``data`` with or without ``canary``.

    All randomness of a model (initial weights, batches, noise) comes from its seed. A present canary is
    sampled in every step like any other example. The sum of clipped gradients is always divided by
    ``sample_rate`` times the number of examples without the canary: a divisor that depended on the canary
    would reveal it.

    If ``initial_weights`` is given, all models start from these weights instead of random ones. ``mechanism``
    defaults to that of the settings; pass a broken one to test audits. A mechanism with state is shared by
    all models.

    Linear layers, convolutions and layers without weights are computed for ``models_at_once`` models
    together. Any other model, or another optimizer than SGD and Adam, is trained by ``Training``, one model
    after another. Frozen parameters and buffers must be the same in all models that ``build`` returns.
    """

    build: Callable[[], nn.Module]
    data: Dataset
    canary: Example
    settings: DPSGD
    loss: Loss = cross_entropy
    mechanism: PrivateSum | None = None
    initial_weights: Tensor | None = None
    models_at_once: int | None = None
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.models_at_once is not None:
            _validate.integer("models_at_once", self.models_at_once)
        size = num_parameters(self._pattern)
        if self.initial_weights is not None and self.initial_weights.shape != (size,):
            shape = tuple(self.initial_weights.shape)
            raise InputError(f"initial_weights must be a vector of length {size:,}, got shape {shape}.")

    @property
    def at_once(self) -> int:
        """The number of models that are trained together."""
        if self._stack is None:
            return 1
        return self.models_at_once or (
            _CONVOLUTIONAL_MODELS if self._stack.has_convolutions else _DENSE_MODELS
        )

    @property
    def expected_batch_size(self) -> float:
        """The divisor of the sum in every step."""
        return self.settings.sample_rate * len(self.data)

    def scores(self, seeds: Sequence[int], present: Sequence[bool], score: Score = log_odds) -> Tensor:
        """Train a model from each seed and return the canary's score from a black-box query of each.

        A diverged model, which outputs NaN, gets the smallest possible score.
        """
        inputs, _ = self._joined.at(torch.tensor([len(self.data)]))
        logits = self.train(seeds, present).logits(inputs)[:, 0]
        return score(logits, self.canary.target).nan_to_num(nan=torch.finfo(torch.float64).min)

    def train(self, seeds: Sequence[int], present: Sequence[bool]) -> TrainedModels:
        """Train a model from each seed, with the canary in its data if ``present``."""
        if len(seeds) != len(present) or not seeds:
            raise InputError(
                f"seeds and present must have the same length, at least 1, got {len(seeds)} and "
                f"{len(present)}."
            )
        blocks = range(0, len(seeds), self.at_once)
        slices = [slice(first, first + self.at_once) for first in blocks]
        weights = [
            self._train_block([Seeds.of(seed) for seed in seeds[block]], present[block]) for block in slices
        ]
        return TrainedModels(torch.cat(weights), self._pattern)

    def _train_block(self, seeds: Sequence[Seeds], present: Sequence[bool]) -> Tensor:
        flat = torch.stack([self._initial_weights(each) for each in seeds]).to(self.device)
        batches = [
            drawn_batches(num_examples=len(self.data), present=there, settings=self.settings, seeds=each)
            for each, there in zip(seeds, present, strict=True)
        ]
        if self._stack is not None:
            return train_stacked(self._stack, flat, self._joined, batches, seeds=seeds, **self._common)
        model = TrainedModels(flat, self._pattern).module(0)
        return self._train_alone(model, batches[0], seeds[0])[None]

    def _train_alone(self, model: nn.Module, batches: Sequence[IntArray], seeds: Seeds) -> Tensor:
        """Train one model with ``Training``; return its flat weights."""
        training = Training(
            model,
            self._joined,
            seeds=seeds,
            device=self._joined.inputs.device,
            sampling=DrawnBatches(batches),
            **self._common,
        )
        with torch.random.fork_rng(devices=[]):  # for layers that use torch's global RNG, such as dropout
            torch.set_rng_state(generator(seeds.augmentation).get_state())
            for _ in training.run():
                pass
        return flat_parameters(model)

    def _initial_weights(self, seeds: Seeds) -> Tensor:
        if self.initial_weights is not None:
            return self.initial_weights
        return flat_parameters(initialize(self.build, seeds.initialization))

    @property
    def _common(self) -> dict[str, Any]:
        """Training arguments that all models have in common."""
        return {
            "settings": self.settings,
            "loss": self.loss,
            "expected_batch_size": self.expected_batch_size,
            "mechanism": self.mechanism or GaussianSum.of(self.settings),
        }

    @cached_property
    def _pattern(self) -> nn.Module:
        return pattern_of(self.build)

    @cached_property
    def _joined(self) -> Dataset:
        return joined(self.data.to(self.device), self.canary)

    @cached_property
    def _stack(self) -> Stack | None:
        """Layers to train many models together; None if the settings or the model do not allow it."""
        if type(self.settings.optimizer) not in (SGD, Adam) or self.settings.augmentation is not None:
            return None
        return Stack.of(self._pattern, self.data.shape)

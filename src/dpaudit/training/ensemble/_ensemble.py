"""Many models trained with DP-SGD, with and without a canary: Algorithm 1 of Nasr et al. 2023."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.errors import InputError
from dpaudit.training._private_sum import GaussianSum, PrivateSum
from dpaudit.training._seeds import Seeds, generator, initialize
from dpaudit.training._settings import DPSGD, SGD
from dpaudit.training._training import Training
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble._layers import Stack
from dpaudit.training.ensemble._models import Example, Score, TrainedModels, joined, log_odds, pattern_of
from dpaudit.training.ensemble._stacked import DrawnBatches, drawn_batches, train_stacked
from dpaudit.training.gradients import Loss, cross_entropy, flat_parameters, num_parameters

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
    together. Any other model, or any optimizer other than SGD, is trained by ``Training``, one model after
    another. Frozen parameters and buffers must be the same in all models that ``build`` returns.
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
            raise InputError(
                f"Expected initial_weights to be a vector of length {size:,}, got shape {shape}."
            )

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
                f"Expected seeds and present to have the same length, at least 1, got {len(seeds)} and "
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
        if type(self.settings.optimizer) is not SGD or self.settings.augmentation is not None:
            return None
        return Stack.of(self._pattern, self.data.shape)

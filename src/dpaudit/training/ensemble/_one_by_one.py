"""The engine for all other models: ``Training``, one model after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpaudit.training._mechanism import Mechanism
from dpaudit.training._seeds import Seeds, generator
from dpaudit.training._settings import DPSGD
from dpaudit.training._training import Training
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble._batches import DrawnBatches, IntArray
from dpaudit.training.gradients import Loss, flat_parameters

__all__ = ["train_one"]


def train_one(
    model: nn.Module,
    data: Dataset,
    batches: Sequence[IntArray],
    *,
    seeds: Seeds,
    settings: DPSGD,
    mechanism: Mechanism,
    loss: Loss,
    expected_batch_size: float,
) -> Tensor:
    """Train one model; returns its flat weights."""
    training = Training(
        model,
        data,
        settings,
        loss=loss,
        seeds=seeds,
        device=data.inputs.device,
        sampling=DrawnBatches(batches),
        mechanism=mechanism,
        expected_batch_size=expected_batch_size,
    )
    with torch.random.fork_rng(devices=[]):  # for what draws from torch's own generator, such as dropout
        torch.set_rng_state(generator(seeds.augmentation).get_state())
        for _ in training.run():
            pass
    return flat_parameters(model)

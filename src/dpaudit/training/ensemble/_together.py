"""The engine for models of linear layers and convolutions: all of them in the same tensor operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpaudit.training._mechanism import Mechanism
from dpaudit.training._optimizers import SGD
from dpaudit.training._seeds import Seeds, generator
from dpaudit.training._settings import DPSGD
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble._batches import IntArray, side_by_side
from dpaudit.training.ensemble._descent import Descent
from dpaudit.training.ensemble._private_sum import private_sum
from dpaudit.training.ensemble._stack import Stack
from dpaudit.training.gradients import Loss

__all__ = ["can_train_together", "train_together"]


def can_train_together(settings: DPSGD) -> bool:
    """Whether these settings are known here; what is not, is trained one after another."""
    return type(settings.optimizer) is SGD and settings.augmentation is None


def train_together(
    stack: Stack,
    flat: Tensor,
    data: Dataset,
    batches: Sequence[Sequence[IntArray]],
    *,
    seeds: Sequence[Seeds],
    settings: DPSGD,
    mechanism: Mechanism,
    loss: Loss,
    expected_batch_size: float,
) -> Tensor:
    """Train the models with weights ``flat``, in place; returns them."""
    assert isinstance(settings.optimizer, SGD)
    noise = [generator(each.noise, flat.device) for each in seeds]
    descent, total = Descent(settings.optimizer, flat), torch.empty_like(flat)
    squares = stack.squares(data.inputs)
    for table, sizes in side_by_side(batches, filler=0):
        places = table.view(-1).to(flat.device)
        inputs, targets = data.at(places)
        real = (torch.arange(table.shape[1]) < sizes[:, None]).view(-1).to(flat.device)
        known = None if squares is None else squares.index_select(0, places)
        rows = stack.rows(flat, inputs, targets, real=real, loss=loss, squares=known)
        descent.step(private_sum(mechanism, rows, sizes, noise, total), expected_batch_size)
    return flat

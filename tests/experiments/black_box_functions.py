"""Training functions of a user, found by their names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dpaudit.training.data import Dataset


def train(data: Dataset, seed: int) -> nn.Module:
    """A model that has seen every example once."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.functional.cross_entropy(model(data.inputs), data.targets).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for value in model.parameters():
            assert value.grad is not None
            value.sub_(value.grad)
    return model


def train_sometimes(data: Dataset, seed: int) -> float:
    """A score, but not from every fourth seed."""
    if seed % 4 == 0:
        raise RuntimeError("no luck today")
    return float(len(data))


def train_unless_told(data: Dataset, seed: int) -> float:
    """Fails as long as a file is there."""
    if seed % 2 and Path("broken").exists():
        raise RuntimeError("broken")
    return float(len(data))


def train_and_change(data: Dataset, seed: int) -> float:
    """Adds noise to the data that the next trial gets, too."""
    data.inputs.add_(torch.randn(data.inputs.shape, generator=torch.Generator().manual_seed(seed)))
    return float(data.inputs.sum())


def train_never(data: Dataset, seed: int) -> float:
    """Nothing comes of it."""
    raise ValueError(f"{len(data)} examples are not enough for seed {seed % 1}")

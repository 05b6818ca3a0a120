"""How well a model does."""

from __future__ import annotations

import torch
from torch import nn

from dpaudit.training.data._dataset import Dataset

__all__ = ["accuracy"]

_AT_ONCE = 1_000


def accuracy(model: nn.Module, data: Dataset) -> float:
    """The share of examples whose class has the largest output. Not private: for data nobody hides."""
    was_training = model.training
    model.eval()
    correct = 0
    with torch.inference_mode():
        for indices in torch.arange(len(data)).split(_AT_ONCE):  # type: ignore[no-untyped-call]
            inputs, targets = data.at(indices)
            correct += int((model(inputs).argmax(dim=1) == targets).sum())
    model.train(was_training)
    return correct / len(data)

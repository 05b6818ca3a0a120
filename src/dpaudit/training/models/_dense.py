"""Models of linear layers only."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from dpaudit import _validate
from dpaudit.errors import InputError

__all__ = ["logistic_regression", "mlp", "purchase_mlp"]


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers from one size to the next, with ReLU between them; images are flattened first."""
    if len(sizes) < 2:
        raise InputError(f"Expected the sizes of the input and the output at least, got {sizes}.")
    for size in sizes:
        _validate.whole("sizes", size)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def logistic_regression(num_features: int, num_classes: int) -> nn.Sequential:
    """One linear layer."""
    return mlp(num_features, num_classes)


def purchase_mlp() -> nn.Sequential:
    """The paper's three fully connected layers for Purchase-100."""
    return mlp(600, 256, 128, 100)

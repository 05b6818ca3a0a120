"""Layers of many models at once: each model has weights of its own, and a batch of its own to apply them to.

The rows of a value are those of the first model's batch, then those of the second's, and so on. What a layer
has to tell of its per-example gradients is their norms and, for each model, a weighted sum of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dpaudit.training.gradients._rows import without_skipped

__all__ = ["Layer", "Linear", "Seen", "affine", "parts"]

_NARROW = 32  # a product with fewer outputs is up to twice as fast when its transpose is computed


class Seen(Protocol):
    """The per-example gradients of one layer."""

    def squared_norms(self) -> Tensor:
        """Of each row."""
        ...

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add to each model's flat row of ``out`` its gradients, ``weights`` (models x examples) times."""
        ...


class Layer(Protocol):
    """A layer of one model, as the pattern of the same layer of many."""

    def forward(self, values: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """What the weights are multiplied with, and the outputs; ``flat`` has a row for each model."""
        ...

    def seen(self, inputs: Tensor, gradients: Tensor, squares: Tensor | None = None) -> Seen:
        """The per-example gradients, from such inputs and the gradients at the outputs.

        ``squares``, if known, are the squared norms of what was given to ``forward``.
        """
        ...


def parts(layer: nn.Linear | nn.Conv2d, flat: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weights of all models as models x outputs x inputs, and the biases; they share memory."""
    size = layer.weight.numel()
    weight = flat[:, :size].view(len(flat), len(layer.weight), -1)
    return weight, None if layer.bias is None else flat[:, size:]


@dataclass(frozen=True, eq=False)
class Linear:
    """``nn.Linear`` on feature vectors."""

    layer: nn.Linear

    def forward(self, values: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        inputs = values.view(len(flat), -1, values.shape[1])
        return values, affine(inputs, *parts(self.layer, flat)).flatten(0, 1)

    def seen(self, inputs: Tensor, gradients: Tensor, squares: Tensor | None = None) -> Seen:
        if squares is None:
            squares = torch.linalg.vector_norm(inputs, dim=1).square_()
        return _SeenByLinear(self.layer, inputs, gradients, squares)


def affine(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Inputs times weights and bias, for every model."""
    if weight.shape[1] >= _NARROW:
        return (
            torch.bmm(inputs, weight.mT) if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)
        )
    if bias is None:
        return torch.bmm(weight, inputs.mT).mT
    return torch.baddbmm(bias[:, :, None], weight, inputs.mT).mT


@dataclass(frozen=True, eq=False)
class _SeenByLinear:
    """The gradient of a row is an outer product, and is never formed (Goodfellow 2015, arXiv:1510.01799)."""

    layer: nn.Linear
    inputs: Tensor
    gradients: Tensor
    squares: Tensor
    """The squared norms of the inputs."""

    def squared_norms(self) -> Tensor:
        outputs: Tensor = torch.linalg.vector_norm(self.gradients, dim=1)
        return outputs.square_().mul_(self.squares if self.layer.bias is None else self.squares + 1.0)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        each = weights.flatten()
        gradients = (without_skipped(self.gradients, each) * each[:, None]).view(*weights.shape, -1)
        inputs = without_skipped(self.inputs, each).view(*weights.shape, -1)
        weight, bias = parts(self.layer, out)
        weight.baddbmm_(gradients.mT, inputs)
        if bias is not None:
            bias.add_(gradients.sum(dim=1))

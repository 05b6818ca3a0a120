"""A model's trainable parameters as one flat vector, always in the order of ``named_parameters()``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpaudit.errors import InputError

__all__ = ["flat_parameters", "flat_zeros", "num_parameters", "set_flat_gradient", "split", "trainable"]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a tied parameter once."""
    found = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not found:
        raise InputError("Expected a model with at least one parameter that requires a gradient.")
    return found


def num_parameters(model: nn.Module) -> int:
    """How long the flat vector is."""
    return sum(value.numel() for value in trainable(model).values())


def flat_zeros(model: nn.Module) -> Tensor:
    """A vector of zeros with a place for each trainable parameter."""
    parameters = list(trainable(model).values())
    first = parameters[0]
    return torch.zeros(sum(value.numel() for value in parameters), dtype=first.dtype, device=first.device)


def flat_parameters(model: nn.Module) -> Tensor:
    """A copy of all trainable parameters."""
    return torch.cat([value.detach().reshape(-1) for value in trainable(model).values()])


def set_flat_gradient(model: nn.Module, gradient: Tensor) -> None:
    """Let every parameter's ``grad`` be its piece of ``gradient``: no copy is made."""
    parameters = list(trainable(model).values())
    pieces = split(gradient, [value.numel() for value in parameters])
    for value, piece in zip(parameters, pieces, strict=True):
        value.grad = piece.view_as(value)


def split(vector: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Pieces of a flat vector, that share its memory."""
    return torch.split_with_sizes(vector, sizes)

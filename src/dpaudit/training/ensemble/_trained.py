"""What an ensemble trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpaudit.training.ensemble._pattern import pattern_of
from dpaudit.training.gradients._flat import split, trainable

__all__ = ["TrainedModels", "with_weights"]


@dataclass(frozen=True, eq=False)
class TrainedModels:
    """Models of one kind; ``weights`` has a flat row for each, in the order of ``named_parameters()``."""

    weights: Tensor
    pattern: nn.Module

    def __len__(self) -> int:
        return len(self.weights)

    def logits(self, inputs: Tensor) -> Tensor:
        """The outputs of all models for the same inputs: models x inputs x classes."""
        pattern = copy.deepcopy(self.pattern).to(self.weights.device).eval()
        with torch.inference_mode():
            found = [functional_call(pattern, named(pattern, row), (inputs,)) for row in self.weights]
        return torch.stack(found)

    def module(self, number: int) -> nn.Module:
        """One of the models, as a module of its own."""
        made = copy.deepcopy(self.pattern).to(self.weights.device)
        with torch.no_grad():
            for name, value in named(made, self.weights[number]).items():
                made.get_parameter(name).copy_(value)
        return made


def named(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """The pieces of a flat vector, by the names of the parameters that they stand for."""
    parameters = trainable(model)
    pieces = split(flat, [value.numel() for value in parameters.values()])
    return {
        name: piece.view_as(value) for (name, value), piece in zip(parameters.items(), pieces, strict=True)
    }


def with_weights(build: Callable[[], nn.Module], flat: Tensor) -> nn.Module:
    """A new model with these weights."""
    return TrainedModels(flat[None], pattern_of(build)).module(0)

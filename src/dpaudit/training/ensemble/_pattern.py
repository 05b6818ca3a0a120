"""What all models of one kind have in common: everything but the weights that are trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpaudit.errors import InputError
from dpaudit.training._seeds import initialize

__all__ = ["pattern_of"]


def pattern_of(build: Callable[[], nn.Module]) -> nn.Module:
    """A model for the weights of any other to be put into.

    Only trained weights are kept of a model. So what is not trained has to be the same in all of them, and a
    second one, from another seed, shows whether it is.
    """
    pattern, other = (initialize(build, seed) for seed in (0, 1))
    first, second = _not_trained(pattern), _not_trained(other)
    for name, value in first.items():
        if name not in second or not torch.equal(value, second[name]):
            raise InputError(
                "Expected parameters that are frozen, and buffers, to be the same in every model that build "
                f"makes, got other values of {name!r} from another seed: train it too, or set its values."
            )
    return pattern


def _not_trained(model: nn.Module) -> dict[str, Tensor]:
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    return frozen | dict(model.named_buffers())

"""Many models of one kind, whose layers are computed together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpaudit.training.ensemble._conv import Conv
from dpaudit.training.ensemble._layers import Layer, Linear, Seen
from dpaudit.training.gradients import Loss
from dpaudit.training.gradients._book_keeping import chain
from dpaudit.training.gradients._loss import checked

__all__ = ["Stack", "StackedRows"]

# Modules without weights or chance that look at one example at a time.
_PLAIN = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.ELU,
    nn.GELU,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.MaxPool2d,
    nn.ReLU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.Tanh,
)


@dataclass(frozen=True, eq=False)
class StackedRows:
    """The gradients of all batches: norms are models x examples, ``out`` has a flat row for each model.

    So every mechanism can clip them as it clips those of one model.
    """

    layers: Sequence[Seen]
    sizes: Sequence[int]
    """How many parameters each layer has."""
    num_models: int

    def norms(self) -> Tensor:
        total = self.layers[0].squared_norms()
        for layer in self.layers[1:]:
            total += layer.squared_norms()
        return total.sqrt_().view(self.num_models, -1)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        for layer, part in zip(self.layers, out.split_with_sizes(list(self.sizes), dim=1), strict=True):
            layer.add_weighted(weights, part)


@dataclass(frozen=True, eq=False)
class Stack:
    """The layers of a model, one after another: some have weights, the others are torch's own modules."""

    leaves: Sequence[Layer | nn.Module]
    sizes: Sequence[int]

    @classmethod
    def of(cls, model: nn.Module, shape: Sequence[int]) -> Stack | None:
        """The pattern of a model for inputs of this shape; None if it has a part that is not known here."""
        modules = chain(model)
        if modules is None or not all(value.requires_grad for value in model.parameters()):
            return None
        leaves, values = [], next(model.parameters()).new_zeros(1, *shape)
        for module in modules:
            leaf = _leaf(module, values.dim())
            if leaf is None:
                return None
            leaves.append(leaf)
            with torch.no_grad():
                values = module(values)
        sizes = [
            sum(v.numel() for v in m.parameters()) for m in modules if isinstance(m, nn.Linear | nn.Conv2d)
        ]
        return cls(leaves, sizes) if sizes else None

    @property
    def has_convolutions(self) -> bool:
        """Whether some layer is one."""
        return any(isinstance(leaf, Conv) for leaf in self.leaves)

    def squares(self, inputs: Tensor) -> Tensor | None:
        """The squared norms of inputs that go into a linear layer as they are: they need to be found once."""
        first = next(leaf for leaf in self.leaves if not isinstance(leaf, nn.Flatten))
        return inputs.flatten(1).square().sum(dim=1) if isinstance(first, Linear) else None

    def rows(
        self,
        flat: Tensor,
        inputs: Tensor,
        targets: Tensor,
        *,
        real: Tensor,
        loss: Loss,
        squares: Tensor | None = None,
    ) -> StackedRows:
        """The gradients of all batches, at the models' ``flat`` weights; rows that are not real get zeros."""
        outputs, seen = self._forward(flat, inputs)
        total = checked(loss, outputs, targets) @ real.to(outputs.dtype)
        gradients = torch.autograd.grad(total, [values for _, _, values in seen])
        known = [squares, *[None] * (len(seen) - 1)]
        layers = [
            layer.seen(before.detach(), gradient, norms)
            for (layer, before, _), gradient, norms in zip(seen, gradients, known, strict=True)
        ]
        return StackedRows(layers, self.sizes, len(flat))

    def _forward(self, flat: Tensor, inputs: Tensor) -> tuple[Tensor, list[tuple[Layer, Tensor, Tensor]]]:
        weights = iter(flat.split_with_sizes(list(self.sizes), dim=1))
        values, seen = inputs, []
        for leaf in self.leaves:
            if isinstance(leaf, nn.Module):
                values = leaf(values)
                continue
            before, values = leaf.forward(values, next(weights))
            if not values.requires_grad:  # of the first layer: what comes before needs no gradient
                values.requires_grad_()
            seen.append((leaf, before, values))
        return values, seen


def _leaf(module: nn.Module, dimensions: int) -> Layer | nn.Module | None:
    if type(module) is nn.Linear:
        return Linear(module) if dimensions == 2 else None
    if type(module) is nn.Conv2d:
        return Conv(module) if _is_plain(module) and dimensions == 4 else None
    if type(module) is nn.Flatten:
        return module if (module.start_dim, module.end_dim) == (1, -1) else None
    if type(module) not in _PLAIN or getattr(module, "return_indices", False):
        return None
    return _not_in_place(module)


def _not_in_place(module: nn.Module) -> nn.Module:
    """The outputs of a layer are still needed when the next module has read them."""
    if not getattr(module, "inplace", False):
        return module
    other = copy.deepcopy(module)
    other.inplace = False  # type: ignore[assignment]
    return other


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

"""Per-example gradients of linear layers, without ever forming them.

The gradient of one example for the weight of a linear layer is the outer product of the layer's input a and
the gradient g at its output. Its norm is |g| |a| (Goodfellow 2015, arXiv:1510.01799), and a weighted sum of
such gradients is one matrix product, as in training without privacy (Bu et al. 2022, arXiv:2210.00038). With
several augmentations k of an example its gradient is a sum of outer products, of squared norm
sum_kl (g_k . g_l) (a_k . a_l).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpaudit.training._batch import Batch
from dpaudit.training.gradients._flat import split, trainable
from dpaudit.training.gradients._loss import Loss, checked
from dpaudit.training.gradients._rows import without_skipped

__all__ = ["LinearRows", "book_keeping_rows", "chain", "is_plain_linear"]

# Modules that treat every entry alike. Any other module might let one example see another, and then
# the norms below would be those of something else.
_ENTRYWISE = (
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.ReLU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.Tanh,
)


def is_plain_linear(model: nn.Module) -> bool:
    """Whether the model is linear layers and entrywise functions, one after another, nothing tied."""
    leaves = chain(model)
    return leaves is not None and all(map(_is_known, leaves))


def chain(model: nn.Module) -> list[nn.Module] | None:
    """The modules that are applied one after another; None if a hook or a shared weight says otherwise."""
    leaves = _leaves(model)
    weights = [id(value) for leaf in leaves for value in leaf.parameters(recurse=False)]
    if len(weights) != len(set(weights)) or any(map(_has_hooks, model.modules())):
        return None
    return leaves


def _leaves(module: nn.Module) -> list[nn.Module]:
    if type(module) is nn.Sequential:
        return [leaf for child in module for leaf in _leaves(child)]
    return [module]


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody may change what goes in or out (also torch's older weight norms do)."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_known(leaf: nn.Module) -> bool:
    if type(leaf) is nn.Flatten:
        return (leaf.start_dim, leaf.end_dim) == (1, -1)
    if getattr(leaf, "inplace", False):  # it overwrites the output whose gradient is asked for
        return False
    return type(leaf) is nn.Linear or type(leaf) in _ENTRYWISE


@dataclass(frozen=True, eq=False)
class _Layer:
    """What a linear layer saw: examples x augmentations x features, at its input and its output."""

    layer: nn.Linear
    inputs: Tensor
    gradients: Tensor

    @property
    def has_bias(self) -> bool:
        return self.layer.bias is not None and self.layer.bias.requires_grad

    def squared_norms(self) -> Tensor:
        outputs = _gram(self.gradients)
        total = torch.zeros_like(outputs)
        if self.layer.weight.requires_grad:
            total += outputs * _gram(self.inputs)
        if self.has_bias:
            total += outputs
        return total.sum(dim=(1, 2)).clamp(min=0.0)  # rounding may leave a negative nothing

    def add_weighted(self, weights: Tensor, pieces: dict[int, Tensor]) -> None:
        gradients = without_skipped(self.gradients, weights) * weights[:, None, None]
        if self.layer.weight.requires_grad:
            inputs = without_skipped(self.inputs, weights)
            pieces[id(self.layer.weight)].addmm_(gradients.flatten(0, 1).T, inputs.flatten(0, 1))
        if self.has_bias:
            pieces[id(self.layer.bias)].add_(gradients.sum(dim=(0, 1)))


def _gram(rows: Tensor) -> Tensor:
    if rows.shape[1] == 1:
        return rows.square().sum(dim=2, keepdim=True)
    return rows @ rows.mT


@dataclass(frozen=True, eq=False)
class LinearRows:
    """The gradients of a batch, as inputs and output gradients of each linear layer."""

    parameters: Sequence[nn.Parameter]
    layers: Sequence[_Layer]

    def norms(self) -> Tensor:
        return torch.stack([layer.squared_norms() for layer in self.layers]).sum(dim=0).sqrt()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        parts = split(out, [value.numel() for value in self.parameters])
        pieces = {id(value): part.view_as(value) for value, part in zip(self.parameters, parts, strict=True)}
        for layer in self.layers:
            layer.add_weighted(weights, pieces)


def book_keeping_rows(model: nn.Module, loss: Loss, batch: Batch) -> LinearRows | None:
    """The gradients of a batch, or None where an input has more dimensions than a feature vector."""
    outputs, seen = _forward(model, batch.inputs)
    if any(inputs.dim() != 2 for _, inputs, _ in seen):
        return None
    losses = checked(loss, outputs, batch.targets.repeat_interleave(batch.multiplicity, dim=0))
    total = losses.sum() / batch.multiplicity
    gradients = torch.autograd.grad(total, [output for _, _, output in seen])
    shape = (len(batch), batch.multiplicity, -1)
    layers = [
        _Layer(layer, inputs.detach().view(shape), gradient.view(shape))
        for (layer, inputs, _), gradient in zip(seen, gradients, strict=True)
    ]
    return LinearRows(list(trainable(model).values()), layers)


def _forward(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[tuple[nn.Linear, Tensor, Tensor]]]:
    seen = []
    values = inputs
    for leaf in _leaves(model):
        before, values = values, leaf(values)
        if isinstance(leaf, nn.Linear) and any(value.requires_grad for value in leaf.parameters()):
            seen.append((leaf, before, values))
    return values, seen

"""Many models of the same architecture, computed layer by layer, each with its own weights and batch.

The rows of a tensor are the batch of the first model, followed by the batch of the second, and so on. A layer
provides the norms of its per-example gradients and, for each model, a weighted sum of them. Convolutions are
computed as linear layers on patches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpaudit.training.gradients import ENTRYWISE, Loss, chain, checked, without_skipped

_NARROW = 32  # with fewer outputs, computing the transposed product is up to twice as fast
# Modules without weights or randomness that process each example separately.
_PLAIN = (*ENTRYWISE, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d)


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers of a model in order: stacked layers with weights, and torch modules without."""

    leaves: Sequence[StackedLayer | nn.Module]
    sizes: Sequence[int]

    @classmethod
    def of(cls, model: nn.Module, shape: Sequence[int]) -> Stack | None:
        """Return the layers of a model for inputs of this shape; None if one of them is not supported."""
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
        """Whether some layer is a convolution."""
        return any(isinstance(leaf, StackedConv) for leaf in self.leaves)

    def squares(self, inputs: Tensor) -> Tensor | None:
        """Return the squared norms of the inputs if they go directly into a linear layer; otherwise, None."""
        first = next(leaf for leaf in self.leaves if not isinstance(leaf, nn.Flatten))
        return inputs.flatten(1).square().sum(dim=1) if isinstance(first, StackedLinear) else None

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
        """Return the gradients of all batches at ``flat`` weights; rows that are not ``real`` are zero."""
        outputs, calls = self._forward(flat, inputs)
        total = checked(loss, outputs, targets) @ real.to(outputs.dtype)
        gradients = torch.autograd.grad(total, [values for _, _, values in calls])
        first_squares = [squares, *[None] * (len(calls) - 1)]
        layers = [
            layer.gradients(before.detach(), gradient, norms)
            for (layer, before, _), gradient, norms in zip(calls, gradients, first_squares, strict=True)
        ]
        return StackedRows(layers, self.sizes, len(flat))

    def _forward(
        self, flat: Tensor, inputs: Tensor
    ) -> tuple[Tensor, list[tuple[StackedLayer, Tensor, Tensor]]]:
        """Return the outputs, and each layer with weights together with its inputs and outputs."""
        weights = iter(flat.split_with_sizes(list(self.sizes), dim=1))
        values, calls = inputs, []
        for leaf in self.leaves:
            if isinstance(leaf, nn.Module):
                values = leaf(values)
                continue
            before, values = leaf.forward(values, next(weights))
            if not values.requires_grad:  # first layer: its inputs need no gradient
                values.requires_grad_()
            calls.append((leaf, before, values))
        return values, calls


def _leaf(module: nn.Module, dimensions: int) -> StackedLayer | nn.Module | None:
    if type(module) is nn.Linear:
        return StackedLinear(module) if dimensions == 2 else None
    if type(module) is nn.Conv2d:
        return StackedConv(module) if dimensions == 4 and _is_plain_convolution(module) else None
    if type(module) is nn.Flatten:
        return module if (module.start_dim, module.end_dim) == (1, -1) else None
    if type(module) not in _PLAIN or getattr(module, "return_indices", False):
        return None
    if getattr(module, "inplace", False):  # would overwrite a layer's output, which is still needed
        module = copy.deepcopy(module)
        module.inplace = False  # type: ignore[assignment]
    return module


def _is_plain_convolution(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)


@dataclass(frozen=True, eq=False)
class StackedRows:
    """Gradients of all batches: norms have shape models x examples, ``out`` has a flat row per model.

    Any mechanism can thus clip them like the gradients of a single model.
    """

    layers: Sequence[LayerGradients]
    sizes: Sequence[int]
    """The number of parameters of each layer."""
    num_models: int

    def norms(self) -> Tensor:
        total = self.layers[0].squared_norms()
        for layer in self.layers[1:]:
            total += layer.squared_norms()
        return total.sqrt_().view(self.num_models, -1)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        for layer, piece in zip(self.layers, out.split_with_sizes(list(self.sizes), dim=1), strict=True):
            layer.add_weighted(weights, piece)


class LayerGradients(Protocol):
    """Per-example gradients of one layer."""

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each row."""
        ...

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add the weighted gradients of each model to its row of ``out``; ``weights``: models x examples."""
        ...


class StackedLayer(Protocol):
    """The same layer of many models."""

    def forward(self, values: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor multiplied by the weights, and the outputs; ``flat`` has a row per model."""
        ...

    def gradients(self, inputs: Tensor, outputs: Tensor, squares: Tensor | None = None) -> LayerGradients:
        """Return the per-example gradients from the inputs and the gradients at the ``outputs``.

        ``squares``, if known, are the squared norms of the values passed to ``forward``.
        """
        ...


def split_weights(layer: nn.Linear | nn.Conv2d, flat: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return views of the weights of all models, with shape models x outputs x inputs, and of the biases."""
    size = layer.weight.numel()
    weight = flat[:, :size].view(len(flat), len(layer.weight), -1)
    return weight, None if layer.bias is None else flat[:, size:]


@dataclass(frozen=True, eq=False)
class StackedLinear:
    """``nn.Linear`` on feature vectors."""

    layer: nn.Linear

    def forward(self, values: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        inputs = values.view(len(flat), -1, values.shape[1])
        return values, affine(inputs, *split_weights(self.layer, flat)).flatten(0, 1)

    def gradients(self, inputs: Tensor, outputs: Tensor, squares: Tensor | None = None) -> LayerGradients:
        if squares is None:
            squares = torch.linalg.vector_norm(inputs, dim=1).square_()
        return _StackedLinearGradients(self.layer, inputs, outputs, squares)


def affine(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs times weights plus bias for every model."""
    if weight.shape[1] >= _NARROW:
        return (
            torch.bmm(inputs, weight.mT) if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)
        )
    if bias is None:
        return torch.bmm(weight, inputs.mT).mT
    return torch.baddbmm(bias[:, :, None], weight, inputs.mT).mT


@dataclass(frozen=True, eq=False)
class _StackedLinearGradients:
    """Gradients as outer products that are never formed (Goodfellow 2015, arXiv:1510.01799)."""

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
        weight, bias = split_weights(self.layer, out)
        weight.baddbmm_(gradients.mT, inputs)
        if bias is not None:
            bias.add_(gradients.sum(dim=1))


@dataclass(frozen=True, eq=False)
class StackedConv:
    """``nn.Conv2d`` with a single group and zero padding.

    Its outputs use the channels-last memory format, for which torch's pooling is several times faster.
    """

    layer: nn.Conv2d

    def forward(self, values: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        patches = self._patches(values)  # rows x positions x features
        inputs = patches.reshape(len(flat), -1, patches.shape[2])
        outputs = affine(inputs, *split_weights(self.layer, flat)).contiguous()
        height, width = self._size(values)
        return patches, outputs.view(len(values), height, width, -1).permute(0, 3, 1, 2)

    def gradients(
        self,
        inputs: Tensor,
        outputs: Tensor,
        squares: Tensor | None = None,  # noqa: ARG002
    ) -> LayerGradients:
        positions = outputs.flatten(2)
        return _StackedConvGradients(self.layer, torch.bmm(positions, inputs), positions.sum(dim=2))

    def _patches(self, values: Tensor) -> Tensor:
        (up, left), (down, right) = self.layer.kernel_size, self.layer.stride
        if values.requires_grad or self.layer.dilation != (1, 1):  # its backward pass is faster
            return functional.unfold(values, (up, left), self.layer.dilation, self._padding, (down, right)).mT
        above, beside = self._padding
        windows = functional.pad(values, (beside, beside, above, above))
        windows = windows.unfold(2, up, down).unfold(3, left, right).permute(0, 2, 3, 1, 4, 5)
        return windows.reshape(len(values), windows.shape[1] * windows.shape[2], -1)

    def _size(self, values: Tensor) -> list[int]:
        layer = self.layer
        return [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, padding, dilation, kernel, stride in zip(
                values.shape[2:], self._padding, layer.dilation, layer.kernel_size, layer.stride, strict=True
            )
        ]

    @property
    def _padding(self) -> tuple[int, int]:
        padding = self.layer.padding
        assert not isinstance(padding, str)  # not supported by Stack
        return padding[0], padding[1]


@dataclass(frozen=True, eq=False)
class _StackedConvGradients:
    """Explicit gradients, from one matrix product per example."""

    layer: nn.Conv2d
    weights: Tensor
    """Rows x outputs x features."""
    biases: Tensor

    def squared_norms(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.weights, dim=(1, 2)).square_()
        if self.layer.bias is not None:
            norms += torch.linalg.vector_norm(self.biases, dim=1).square_()
        return norms

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        weight, bias = split_weights(self.layer, out)
        _add(self.weights, weights, weight.flatten(1))
        if bias is not None:
            _add(self.biases, weights, bias)


def _add(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    each = without_skipped(rows.flatten(1), weights.flatten()).view(*weights.shape, -1)
    out.unsqueeze(1).baddbmm_(weights[:, None], each)

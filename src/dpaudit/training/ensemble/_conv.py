"""Convolutions of many models at once, as linear layers on patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpaudit.training.ensemble._layers import Seen, affine, parts
from dpaudit.training.gradients._rows import without_skipped

__all__ = ["Conv"]


@dataclass(frozen=True, eq=False)
class Conv:
    """``nn.Conv2d`` of one group, with zeros around it.

    Its outputs have the channels last in memory, where torch's pooling is several times faster.
    """

    layer: nn.Conv2d

    def forward(self, values: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        patches = self._patches(values)  # rows x places x features
        inputs = patches.reshape(len(flat), -1, patches.shape[2])
        outputs = affine(inputs, *parts(self.layer, flat)).contiguous()
        height, width = self._size(values)
        return patches, outputs.view(len(values), height, width, -1).permute(0, 3, 1, 2)

    def seen(self, inputs: Tensor, gradients: Tensor, squares: Tensor | None = None) -> Seen:  # noqa: ARG002
        outputs = gradients.flatten(2)
        return _SeenByConv(self.layer, torch.bmm(outputs, inputs), outputs.sum(dim=2))

    def _patches(self, values: Tensor) -> Tensor:
        (up, left), (down, right) = self.layer.kernel_size, self.layer.stride
        if values.requires_grad or self.layer.dilation != (1, 1):  # its way back is the faster one
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
        assert not isinstance(padding, str)  # a word is not taken: see Stack
        return padding[0], padding[1]


@dataclass(frozen=True, eq=False)
class _SeenByConv:
    """The gradients as they are: one matrix product an example has found them."""

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
        weight, bias = parts(self.layer, out)
        _add(self.weights, weights, weight.flatten(1))
        if bias is not None:
            _add(self.biases, weights, bias)


def _add(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    each = without_skipped(rows.flatten(1), weights.flatten()).view(*weights.shape, -1)
    out.unsqueeze(1).baddbmm_(weights[:, None], each)

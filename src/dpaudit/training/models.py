"""The paper's models: dense networks, a small convolutional network and wide residual networks.

The latter follow De et al. 2022 (arXiv:2204.13650): weight standardization, and GroupNorm instead of batch
normalization, which would make the examples of a batch dependent on each other.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpaudit import _validate
from dpaudit.errors import InputError

__all__ = [
    "WeightStandardizedConv2d",
    "conv_net",
    "logistic_regression",
    "mlp",
    "purchase_mlp",
    "wide_resnet",
]

_GROUPS = 16  # groups per GroupNorm


def conv_net(*, in_channels: int = 3, num_classes: int = 10) -> nn.Sequential:
    """Return four convolutions and a linear layer for images of at least 8x8 pixels.

    For CIFAR-10 it has 131,466 parameters. The paper does not specify its ConvNet; this is a common one of
    similar size.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise((in_channels, 32, 64, 64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, num_classes))


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers of these sizes with ReLU activations in between; inputs are flattened first."""
    if len(sizes) < 2:
        raise InputError(f"sizes must have at least those of the input and the output, got {sizes}.")
    for size in sizes:
        _validate.integer("sizes", size)
    weights = sum(before * after for before, after in pairwise(sizes))
    # the weights, their gradient, the noise and the update
    _validate.fits_memory(f"The weights of layers of sizes {', '.join(map(str, sizes))}", 4 * 4.0 * weights)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def logistic_regression(num_features: int, num_classes: int) -> nn.Sequential:
    """Return a single linear layer."""
    return mlp(num_features, num_classes)


def purchase_mlp() -> nn.Sequential:
    """Return the paper's network of three fully connected layers for Purchase-100."""
    return mlp(600, 256, 128, 100)


def wide_resnet(
    depth: int = 16, width: int = 4, *, in_channels: int = 3, num_classes: int = 10
) -> nn.Sequential:
    """Return WRN-``depth``-``width`` (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""
    blocks, rest = divmod(_validate.integer("depth", depth, low=10) - 4, 6)
    if rest:
        raise InputError(f"depth must be 4 more than a multiple of 6, got {depth}.")
    channels = [16, *(size * _validate.integer("width", width) for size in (16, 32, 64))]
    layers: list[nn.Module] = [WeightStandardizedConv2d(in_channels, channels[0], 3, padding=1)]
    for stage in range(3):
        for index in range(blocks):
            before = channels[stage + (index > 0)]
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(_Block(before, channels[stage + 1], stride))
    layers += [nn.GroupNorm(_GROUPS, channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels[-1], num_classes))


class _Block(nn.Module):
    """Residual block: normalization, activation and convolution, twice."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(_GROUPS, before), nn.GroupNorm(_GROUPS, after)
        self.conv1 = WeightStandardizedConv2d(before, after, 3, stride=stride, padding=1)
        self.conv2 = WeightStandardizedConv2d(after, after, 3, padding=1)
        changes = before != after or stride != 1
        self.shortcut = WeightStandardizedConv2d(before, after, 1, stride=stride) if changes else None

    def forward(self, values: Tensor) -> Tensor:
        active = functional.relu(self.norm1(values))
        shortcut = values if self.shortcut is None else self.shortcut(active)
        inner = self.conv1(active)
        outputs: Tensor = shortcut + self.conv2(functional.relu(self.norm2(inner)))
        return outputs


class WeightStandardizedConv2d(nn.Conv2d):
    """Convolution whose filters have mean 0 and variance 1 / fan-in (Qiao et al. 2019, arXiv:1903.10520).

    It controls the scale of activations, as batch normalization does, without making examples dependent on
    each other.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # name used by torch
        filters = self.weight.flatten(1)
        variance, mean = torch.var_mean(filters, dim=1, keepdim=True, correction=0)
        scale = torch.rsqrt((variance * filters.shape[1]).clamp(min=1e-4))
        weight = ((filters - mean) * scale).view_as(self.weight)
        outputs: Tensor = self._conv_forward(input, weight, self.bias)
        return outputs

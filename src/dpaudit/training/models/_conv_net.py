"""A small convolutional network."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

__all__ = ["conv_net"]


def conv_net(*, in_channels: int = 3, num_classes: int = 10) -> nn.Sequential:
    """Four convolutions and a linear layer, 131,466 parameters for CIFAR-10; images of 8x8 and up.

    The paper does not give its ConvNet; this is the usual one of its size.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise((in_channels, 32, 64, 64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, num_classes))

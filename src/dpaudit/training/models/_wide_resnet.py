"""Wide residual networks (Zagoruyko and Komodakis 2016, arXiv:1605.07146).

As De et al. 2022 (arXiv:2204.13650) train them privately: GroupNorm instead of batch normalisation,
which would let the examples of a batch see each other, and weight standardisation.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.training.models._weight_standardized import WeightStandardizedConv2d

__all__ = ["wide_resnet"]

_GROUPS = 16


class _Block(nn.Module):
    """Normalise, activate, convolve, twice; and the input added to it."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(_GROUPS, before), nn.GroupNorm(_GROUPS, after)
        self.conv1 = WeightStandardizedConv2d(before, after, 3, stride=stride, padding=1)
        self.conv2 = WeightStandardizedConv2d(after, after, 3, padding=1)
        changes = before != after or stride != 1
        self.shortcut = WeightStandardizedConv2d(before, after, 1, stride=stride) if changes else None

    def forward(self, values: Tensor) -> Tensor:
        active = functional.relu(self.norm1(values))
        kept = values if self.shortcut is None else self.shortcut(active)
        inner = self.conv1(active)
        outputs: Tensor = kept + self.conv2(functional.relu(self.norm2(inner)))
        return outputs


def wide_resnet(
    depth: int = 16, width: int = 4, *, in_channels: int = 3, num_classes: int = 10
) -> nn.Sequential:
    """WRN-``depth``-``width``: WRN-16-4 by default, WRN-40-4 with ``depth=40``."""
    blocks, rest = divmod(_validate.whole("depth", depth, low=10) - 4, 6)
    if rest:
        raise InputError(f"Expected depth={depth} to be 4 more than a multiple of 6.")
    channels = [16, *(size * _validate.whole("width", width) for size in (16, 32, 64))]
    layers: list[nn.Module] = [WeightStandardizedConv2d(in_channels, channels[0], 3, padding=1)]
    for stage in range(3):
        for index in range(blocks):
            before = channels[stage + (index > 0)]
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(_Block(before, channels[stage + 1], stride))
    layers += [nn.GroupNorm(_GROUPS, channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels[-1], num_classes))

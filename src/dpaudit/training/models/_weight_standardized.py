"""Convolutions whose filters are standardised before use (Qiao et al. 2019, arXiv:1903.10520)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["WeightStandardizedConv2d"]


class WeightStandardizedConv2d(nn.Conv2d):
    """A convolution with every filter at mean 0 and variance 1 / fan-in.

    It replaces what batch normalisation does for the scale of activations, without letting examples see
    each other.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        filters = self.weight.flatten(1)
        variance, mean = torch.var_mean(filters, dim=1, keepdim=True, correction=0)
        scale = torch.rsqrt((variance * filters.shape[1]).clamp(min=1e-4))
        weight = ((filters - mean) * scale).view_as(self.weight)
        outputs: Tensor = self._conv_forward(input, weight, self.bias)
        return outputs

"""Canaries as gradients that a mechanism can clip and add, without their zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpaudit._torch import CanaryVectors

__all__ = ["CanaryRows"]


@dataclass(frozen=True, eq=False)
class CanaryRows:
    """Those canaries that are present, of ``length`` each."""

    vectors: CanaryVectors
    present: Tensor  # their numbers
    length: float

    def norms(self) -> Tensor:
        return torch.full(self.present.shape, self.length, device=self.present.device)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        all_weights = out.new_zeros(self.vectors.num_canaries)
        all_weights[self.present] = weights.to(out.dtype) * self.length
        self.vectors.add(all_weights, out)

"""Canaries as gradients that a mechanism can clip and add, without their zeros."""

from __future__ import annotations

from dataclasses import dataclass

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
        return self.vectors.values.new_full(self.present.shape, self.length)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        lengths = weights * self.length
        self.vectors.add(out.new_zeros(self.vectors.num_canaries).index_copy_(0, self.present, lengths), out)

"""Clipping that lets one example count for too much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpaudit.training._mechanism import GaussianSum
from dpaudit.training.gradients._rows import Rows

__all__ = ["ClippedAfterMean", "RawMeanMixed", "Unclipped"]


@dataclass(frozen=True, kw_only=True)
class Unclipped(GaussianSum):
    """Gradients are added as they are."""

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        norms = [out.new_zeros(0)]
        for chunk in rows:
            norms.append(chunk.norms())
            chunk.add_weighted(torch.ones_like(norms[-1]), out)
        return torch.cat(norms)


@dataclass(frozen=True, kw_only=True)
class ClippedAfterMean(Unclipped):
    """The mean is clipped instead of every gradient (the paper's first violation)."""

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:
        mean_norm = float(total.norm()) / max(num_gradients, 1)
        return total if mean_norm <= self.max_grad_norm else total * (self.max_grad_norm / mean_norm)


@dataclass(frozen=True, kw_only=True)
class RawMeanMixed(GaussianSum):
    """The private gradient is added to the raw one, which nobody had taken away."""

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        norms = [out.new_zeros(0)]
        for chunk in rows:
            norms.append(chunk.norms())
            clipped = (self.max_grad_norm / norms[-1]).clamp(max=1.0)
            chunk.add_weighted(1.0 + clipped, out)
        return torch.cat(norms)

"""Gradients of single examples, in whatever form is cheap: their norms, and a weighted sum of them.

Clipping needs no more than that. So the rows of a linear layer stay products of two small matrices, the rows
of a convolution stay in chunks, and a gradient with one entry that is not zero stays one entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpaudit.training.gradients._flat import split

__all__ = ["DenseRows", "Rows"]


class Rows(Protocol):
    """Some per-example gradients."""

    def norms(self) -> Tensor:
        """The Euclidean norm of each gradient, before clipping."""
        ...

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add ``sum_i weights[i] * gradient[i]`` to the flat vector ``out``.

        A weight of zero leaves its gradient out, even one that is not finite.
        """
        ...


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Gradients as they are: for each parameter a tensor of examples x shape."""

    gradients: Sequence[Tensor]

    def norms(self) -> Tensor:
        parts = [torch.linalg.vector_norm(part.flatten(1), dim=1) for part in self.gradients]
        return torch.stack(parts).square().sum(dim=0).sqrt()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        sizes = [part[0].numel() for part in self.gradients]
        for part, piece in zip(self.gradients, split(out, sizes), strict=True):
            piece.add_(weights @ without_skipped(part.flatten(1), weights))


def without_skipped(rows: Tensor, weights: Tensor) -> Tensor:
    """The rows, with those of weight zero made zero if they are not finite: 0 * inf is not 0."""
    if bool(weights.all()):
        return rows
    skipped = (weights == 0).view(-1, *[1] * (rows.dim() - 1))
    return rows.masked_fill(skipped, 0.0)

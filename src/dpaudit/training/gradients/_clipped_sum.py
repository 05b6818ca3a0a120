"""The clipped sum of a batch: the inner loop of DP-SGD."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpaudit import _validate
from dpaudit.training._batch import Batch
from dpaudit.training.gradients._book_keeping import book_keeping_rows, is_plain_linear
from dpaudit.training.gradients._clip import clip_weights
from dpaudit.training.gradients._flat import flat_zeros
from dpaudit.training.gradients._loss import Loss
from dpaudit.training.gradients._rows import Rows
from dpaudit.training.gradients._vmap import vmap_rows

__all__ = ["ClippedSum", "add_clipped", "clipped_sum", "per_example"]


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """The sum of clipped gradients, and the norms they had before. Neither is private yet."""

    vector: Tensor
    norms: Tensor

    @property
    def num_examples(self) -> int:
        """How many gradients were added."""
        return len(self.norms)


def clipped_sum(model: nn.Module, loss: Loss, batch: Batch, max_grad_norm: float) -> ClippedSum:
    """Clip the gradient of every example to ``max_grad_norm`` and add them up, as one flat vector."""
    _validate.positive("max_grad_norm", max_grad_norm)
    vector = flat_zeros(model)
    norms = add_clipped(per_example(model, loss, batch), max_grad_norm, vector)
    return ClippedSum(vector, norms)


def per_example(model: nn.Module, loss: Loss, batch: Batch) -> Iterable[Rows]:
    """The gradient of every example: book-keeping for linear layers, chunked vmap for all else."""
    if len(batch) == 0:  # happens under Poisson sampling
        return ()
    if is_plain_linear(model):
        rows = book_keeping_rows(model, loss, batch)
        if rows is not None:
            return (rows,)
    return vmap_rows(model, loss, batch)


def add_clipped(rows: Iterable[Rows], max_grad_norm: float, out: Tensor) -> Tensor:
    """Add the clipped gradients to ``out``; returns their norms before clipping."""
    norms = []
    for chunk in rows:
        norms.append(chunk.norms())
        chunk.add_weighted(clip_weights(norms[-1], max_grad_norm), out)
    return norms[0] if len(norms) == 1 else torch.cat([out.new_zeros(0), *norms])

"""Per-example gradients of any module, by ``torch.func``: vmap(grad), a chunk of examples at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from dpaudit.errors import InputError
from dpaudit.training._batch import Batch
from dpaudit.training.gradients._flat import num_parameters, trainable
from dpaudit.training.gradients._loss import Loss, checked
from dpaudit.training.gradients._rows import DenseRows

__all__ = ["vmap_rows"]

# Smaller chunks call torch more often (64 takes a tenth longer on a ConvNet); larger ones take more memory.
_LARGEST_CHUNK = 128
_MOST_NUMBERS = 2**27  # of a chunk's gradients: half a gigabyte


def vmap_rows(model: nn.Module, loss: Loss, batch: Batch) -> Iterator[DenseRows]:
    """The gradients of a batch, in chunks, so that they are never in memory all at once."""
    refuse_batch_norm(model)
    chunk = max(1, min(_LARGEST_CHUNK // batch.multiplicity, _MOST_NUMBERS // num_parameters(model)))
    parameters = {name: value.detach() for name, value in trainable(model).items()}

    def loss_of_one(values: dict[str, Tensor], views: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, values, (views,))
        return checked(loss, outputs, target.expand(len(views), *target.shape)).mean()

    gradients: Any = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    views = batch.views
    for first in range(0, len(batch), chunk):
        part = slice(first, first + chunk)
        yield DenseRows(list(gradients(parameters, views[part], batch.targets[part]).values()))


def refuse_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"Expected a model whose examples do not see each other, but {name or 'it'} is a "
                f"{type(module).__name__}; use GroupNorm or LayerNorm."
            )

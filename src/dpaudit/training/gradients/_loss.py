"""Losses: one number an example, because DP-SGD must never see their mean."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from dpaudit.errors import InputError

__all__ = ["Loss", "checked", "cross_entropy"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""From a batch of outputs and targets to one loss for each row."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each row of logits with its class."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def checked(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The losses, refused if they were already averaged or summed."""
    losses = loss(outputs, targets)
    if losses.shape != targets.shape[:1]:
        raise InputError(
            f"Expected a loss of shape {tuple(targets.shape[:1])}, one number an example, "
            f"got {tuple(losses.shape)}; use reduction='none'."
        )
    return losses

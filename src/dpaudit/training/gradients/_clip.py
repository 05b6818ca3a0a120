"""Clipping: what one example can add to the sum is at most ``max_grad_norm`` long."""

from __future__ import annotations

from torch import Tensor

__all__ = ["clip_weights"]


def clip_weights(norms: Tensor, max_grad_norm: float) -> Tensor:
    """What to multiply each gradient with: min(1, max_grad_norm / norm).

    A gradient whose norm is not finite gets weight zero: it cannot be clipped, and must not get through.

    >>> import torch
    >>> clip_weights(torch.tensor([0.5, 4.0, 0.0, float("nan")]), max_grad_norm=1.0)
    tensor([1.0000, 0.2500, 1.0000, 0.0000])
    """
    return (max_grad_norm / norms).clamp_(max=1.0).nan_to_num_(nan=0.0)  # c / inf is zero already

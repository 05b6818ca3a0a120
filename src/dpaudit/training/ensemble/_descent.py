"""Gradient descent of many models at once."""

from __future__ import annotations

from torch import Tensor

from dpaudit.training._optimizers import SGD

__all__ = ["Descent"]


class Descent:
    """What torch's SGD does, for a row of weights of each model."""

    def __init__(self, optimizer: SGD, flat: Tensor) -> None:
        self._optimizer = optimizer
        self._flat = flat
        self._moving: Tensor | None = None

    def step(self, total: Tensor, expected_batch_size: float) -> None:
        """Update by the mean that ``total`` is the sum of; ``total`` may be overwritten."""
        settings = self._optimizer
        if settings.momentum == 0.0 and settings.weight_decay == 0.0:
            self._flat.add_(total, alpha=-settings.learning_rate / expected_batch_size)
            return
        gradient = total.div_(expected_batch_size)
        if settings.weight_decay:
            gradient.add_(self._flat, alpha=settings.weight_decay)
        if settings.momentum:
            gradient = self._momentum(gradient)
        self._flat.add_(gradient, alpha=-settings.learning_rate)

    def _momentum(self, gradient: Tensor) -> Tensor:
        if self._moving is None:
            self._moving = gradient.clone()
        else:
            self._moving.mul_(self._optimizer.momentum).add_(gradient)
        return self._moving

"""What an input is moved to make small: a number for each input, and how it changes with the input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from dpaudit._torch._held_out import HeldOutData
from dpaudit.canaries import Crafted

__all__ = ["Cosine", "Loss", "NegativeLoss", "Objective", "mean_gradient"]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_AT_ONCE = 128  # held-out examples whose mean gradient is found together
_CHUNK = 16  # canaries: second derivatives of a convolution take much memory
_TINY = 1e-30
_USUAL = Crafted()


class Objective(Protocol):
    """A number for each input of a batch, the smaller the better, and its gradient for that input."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Values, and gradients of the inputs' shape."""
        ...


class _OfOneInput(ABC):
    """A function of one input and its class, and its gradient for the input."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._parameters = _parameters(model)

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        both: Any = vmap(grad_and_value(self._value), chunk_size=_CHUNK, randomness="same")
        gradients, values = both(inputs, targets)
        return values.detach(), gradients.detach()

    @abstractmethod
    def _value(self, one: Tensor, target: Tensor) -> Tensor: ...

    def _loss_of_one(self, parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(self._model, parameters, (one[None],))
        return self._loss(outputs, target[None])[0]


class NegativeLoss(_OfOneInput):
    """Small where the model is wrong."""

    def _value(self, one: Tensor, target: Tensor) -> Tensor:
        return -self._loss_of_one(self._parameters, one, target)


class Cosine(_OfOneInput):
    """The absolute cosine of the example's gradient and a ``reference``: Algorithm 3 of Nasr et al. 2023.

    And what else ``canary`` says of its length.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        reference: dict[str, Tensor],
        *,
        canary: Crafted = _USUAL,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__(model, loss)
        self._reference, self._canary, self._max_grad_norm = reference, canary, max_grad_norm

    def _value(self, one: Tensor, target: Tensor) -> Tensor:
        gradient = grad(self._loss_of_one)(self._parameters, one, target)
        dot = torch.stack([(part * self._reference[name]).sum() for name, part in gradient.items()]).sum()
        norm, other = _norm(gradient), _norm(self._reference)
        value: Tensor = self._canary.objective((dot / (norm * other)).abs(), norm, self._max_grad_norm)
        return value


def mean_gradient(model: nn.Module, loss: Loss, data: HeldOutData) -> dict[str, Tensor]:
    """The mean gradient of held-out examples, by the parameters' names."""
    names = list(_parameters(model))
    values = [value for value in model.parameters() if value.requires_grad]
    total = [torch.zeros_like(value) for value in values]
    for inputs, targets in zip(data.inputs.split(_AT_ONCE), data.targets.split(_AT_ONCE), strict=True):  # type: ignore[no-untyped-call]
        with torch.enable_grad():
            losses = loss(model(inputs), targets).sum() / len(data)
        for part, more in zip(total, torch.autograd.grad(losses, values), strict=True):
            part.add_(more)
    return dict(zip(names, total, strict=True))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def _norm(parts: dict[str, Tensor]) -> Tensor:
    """Never zero, where a square root has no derivative."""
    return (torch.stack([part.square().sum() for part in parts.values()]).sum() + _TINY).sqrt()

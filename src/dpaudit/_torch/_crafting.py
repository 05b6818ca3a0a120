"""Crafting of input canaries, from a description, a model and held-out data.

:class:`Crafting` crafts them; :class:`CanarySequence` provides those of each step, and crafts them again when
due. The objectives of a search are the negative loss, and the cosine of Algorithm 3 of Nasr et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from dpaudit._torch._canaries import HeldOutData
from dpaudit.canaries import (
    Adversarial,
    Blank,
    CanaryCoins,
    Crafted,
    CraftingSearch,
    InputCanary,
    InputDomain,
    Mislabelled,
    Objective,
)
from dpaudit.errors import InputError

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with the number of completed steps and the total number of steps."""

_MEAN_CHUNK = 128  # held-out examples whose mean gradient is computed together
_CANARY_CHUNK = 16  # canaries: second derivatives of a convolution take a lot of memory
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Examples:
    """Preprocessed inputs and their classes."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


class CanarySequence:
    """The input canaries of each step: crafted before the first step, and again whenever they are due."""

    def __init__(self, canary: InputCanary, coins: CanaryCoins, purpose: int) -> None:
        self._canary, self._coins, self._purpose = canary, coins, purpose
        self.current: Examples | None = None
        self.made_at: int | None = None

    def at(self, index: int, craft: Callable[[InputCanary, int, np.random.Generator], Examples]) -> Examples:
        """Return the canaries of a step; ``craft`` creates them and is, for example, a :class:`Crafting`."""
        if self.current is None or self._canary.is_due(index, self.made_at):
            rng = self._coins.rng(index, self._purpose)
            self.current, self.made_at = craft(self._canary, self._coins.num_canaries, rng), index
        return self.current


@dataclass(frozen=True, kw_only=True, eq=False)
class Crafting:
    """A function that crafts canaries from held-out data, for the current weights of the model.

    ``on_step`` is called in each step of a search. The model and torch's global RNG are left unchanged.
    """

    model: nn.Module
    loss: Loss
    data: HeldOutData
    max_grad_norm: float
    on_step: ProgressCallback | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data, HeldOutData):
            raise InputError(
                f"data must be split off by hold_out(), got a {type(self.data).__name__}: canaries must not "
                "be made from training examples."
            )

    def __call__(self, canary: InputCanary, num_canaries: int, rng: np.random.Generator) -> Examples:
        """Craft canaries, each from a different example if there are enough."""
        count = len(self.data)
        chosen = torch.from_numpy(rng.choice(count, num_canaries, replace=num_canaries > count))
        chosen = chosen.to(self.data.inputs.device)
        inputs, targets = self.data.inputs.index_select(0, chosen), self.data.targets.index_select(0, chosen)
        with torch.random.fork_rng(devices=[]):  # used by dropout, for example
            return self._craft(canary, Examples(inputs, targets), rng)

    def _craft(self, canary: InputCanary, start: Examples, rng: np.random.Generator) -> Examples:
        match canary:
            case Blank():
                zeros = InputDomain.of(self.data.inputs).nearest(torch.zeros_like(start.inputs))
                return Examples(zeros, self._random_classes(0, start, rng))
            case Mislabelled():
                others = self._random_classes(1, start, rng)
                return Examples(start.inputs, (start.targets + others) % self.data.num_classes)
            case Adversarial():
                objective = negative_loss_objective(self.model, self.loss)
                return self._search(objective, canary, start, radius=canary.radius)
            case Crafted():
                reference = mean_gradient(self.model, self.loss, self.data)
                objective = cosine_objective(self.model, self.loss, reference, canary, self.max_grad_norm)
                return self._search(objective, canary, start)
        raise InputError(f"canary must be an input canary such as Crafted(), got {canary!r}.")

    def _random_classes(self, low: int, like: Examples, rng: np.random.Generator) -> Tensor:
        """Draw a number in [low, num_classes) for each example."""
        return torch.from_numpy(rng.integers(low, self.data.num_classes, len(like))).to(like.targets)

    def _search(
        self,
        objective: Objective,
        canary: Adversarial | Crafted,
        start: Examples,
        *,
        radius: float | None = None,
    ) -> Examples:
        search = CraftingSearch(
            domain=InputDomain.of(self.data.inputs),
            num_steps=canary.num_steps,
            step_size=canary.step_size,
            radius=radius,
            loop=self._loop,
        )
        return Examples(search(objective, start.inputs, start.targets), start.targets)

    def _loop(self, num_steps: int, step: Callable[[int, Any], Any], state: Any) -> Any:
        for number in range(num_steps):
            state = step(number, state)
            if self.on_step is not None:
                self.on_step(number + 1, num_steps)
        return state


def negative_loss_objective(model: nn.Module, loss: Loss) -> Objective:
    """Return an objective that is small where the loss is large."""
    parameters = _parameters(model)
    return _with_gradient(lambda example, target: -loss_of_one(model, loss, parameters, example, target))


def cosine_objective(
    model: nn.Module, loss: Loss, reference: dict[str, Tensor], canary: Crafted, max_grad_norm: float
) -> Objective:
    """Return the absolute cosine of the example's gradient and a ``reference`` (Algorithm 3 of the paper).

    ``canary`` may add a term for the gradient norm.
    """
    parameters = _parameters(model)

    def value(example: Tensor, target: Tensor) -> Tensor:
        gradient = grad(lambda values: loss_of_one(model, loss, values, example, target))(parameters)
        dot = torch.stack([(tensor * reference[name]).sum() for name, tensor in gradient.items()]).sum()
        norm, other = _norm(gradient), _norm(reference)
        objective: Tensor = canary.objective((dot / (norm * other)).abs(), norm, max_grad_norm)
        return objective

    return _with_gradient(value)


def _with_gradient(value: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Return the batched objective of a function of one input and its class."""
    both: Any = vmap(grad_and_value(value), chunk_size=_CANARY_CHUNK, randomness="same")

    def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = both(inputs, targets)
        return values.detach(), gradients.detach()

    return objective


def loss_of_one(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], one: Tensor, target: Tensor
) -> Tensor:
    """Return the loss of one example at these model parameters."""
    outputs = functional_call(model, parameters, (one[None],))
    return loss(outputs, target[None])[0]


def mean_gradient(model: nn.Module, loss: Loss, data: HeldOutData) -> dict[str, Tensor]:
    """Return the mean gradient of held-out examples, by parameter name."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    values = list(parameters.values())
    total = [torch.zeros_like(value) for value in values]
    for inputs, targets in zip(data.inputs.split(_MEAN_CHUNK), data.targets.split(_MEAN_CHUNK), strict=True):  # type: ignore[no-untyped-call]
        with torch.enable_grad():
            losses = loss(model(inputs), targets).sum() / len(data)
        for gradient, more in zip(total, torch.autograd.grad(losses, values), strict=True):
            gradient.add_(more)
    return dict(zip(parameters, total, strict=True))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def _norm(tensors: dict[str, Tensor]) -> Tensor:
    """Return the norm, kept above zero, where the square root has no derivative."""
    return (torch.stack([tensor.square().sum() for tensor in tensors.values()]).sum() + _TINY).sqrt()

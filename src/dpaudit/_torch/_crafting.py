"""Crafting of input canaries, from a description, a model and held-out data.

:class:`Crafting` crafts them; :class:`CanarySequence` provides those of each step, and crafts them again when
due. A :class:`CraftingSearch` moves inputs through their :class:`InputDomain` to minimize an ``Objective``:
the negative loss, or the cosine of Algorithm 3 of Nasr et al. 2023.
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
from dpaudit.canaries import Adversarial, Blank, CanaryCoins, Crafted, InputCanary, Mislabelled
from dpaudit.errors import InputError

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps inputs and classes to one value each, the smaller the better, and its gradient in the input."""
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
                f"Expected data that hold_out() split off, got a {type(self.data).__name__}: canaries must "
                "not be made from training examples."
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
                zeros = InputDomain.of(self.data).nearest(torch.zeros_like(start.inputs))
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
        raise InputError(f"Expected canary to be an input canary such as Crafted(), got {canary!r}.")

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
            domain=InputDomain.of(self.data),
            num_steps=canary.num_steps,
            step_size=canary.step_size,
            radius=radius,
            on_step=self.on_step,
        )
        return Examples(search(objective, start.inputs, start.targets), start.targets)


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


@dataclass(frozen=True, eq=False)
class InputDomain:
    """The range from ``low`` to ``high`` of each entry, or just these two values if features are binary.

    The pixels of an image share one range; the features of a table have one each.
    """

    low: Tensor
    high: Tensor
    is_binary: bool

    @classmethod
    def of(cls, data: HeldOutData) -> InputDomain:
        """Return the range of the held-out examples; training examples are not used."""
        inputs = data.inputs
        low, high = inputs.min(), inputs.max()
        is_binary = bool(low < high) and bool(((inputs == low) | (inputs == high)).all())
        if inputs.dim() == 2 and not is_binary:
            low, high = inputs.amin(dim=0), inputs.amax(dim=0)
        return cls(low, high, is_binary)

    @property
    def span(self) -> Tensor:
        """The length of the range, the unit of step sizes and radii."""
        return self.high - self.low

    def nearest(self, inputs: Tensor) -> Tensor:
        """Return the nearest inputs in the domain; ties go to ``low``."""
        if self.is_binary:
            return torch.where(inputs > (self.low + self.high) / 2, self.high, self.low)
        return inputs.clamp(self.low, self.high)

    def flipped(self, inputs: Tensor) -> Tensor:
        """Return the inputs with every binary feature flipped."""
        return self.low + self.high - inputs


@dataclass(frozen=True, kw_only=True, eq=False)
class CraftingSearch:
    """A search with ``num_steps`` steps of ``step_size`` spans, at most ``radius`` spans from the start.

    It returns the best input that it tried, so no canary is worse than the example it was made from.
    """

    domain: InputDomain
    num_steps: int
    step_size: float
    radius: float | None = None
    on_step: ProgressCallback | None = None

    def __call__(self, objective: Objective, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the best inputs found, starting from these."""
        search = self._flip_features if self.domain.is_binary else self._descend
        return search(objective, inputs, targets)

    def _descend(self, objective: Objective, start: Tensor, targets: Tensor) -> Tensor:
        """Step along the sign of the gradient: projected gradient descent."""
        inputs = best = start
        values, gradients = objective(inputs, targets)
        least = values
        for step in range(self.num_steps):
            # shrinking steps: long ones find the region, short ones the minimum
            length = self.step_size * (1 - step / self.num_steps)
            inputs = self._project(start, inputs - length * self.domain.span * gradients.sign())
            values, gradients = objective(inputs, targets)
            best, least = _better(best, least, inputs, values)
            self._report(step)
        return best

    def _report(self, step: int) -> None:
        if self.on_step is not None:
            self.on_step(step + 1, self.num_steps)

    def _project(self, start: Tensor, inputs: Tensor) -> Tensor:
        if self.radius is not None:
            distance = self.radius * self.domain.span
            inputs = torch.minimum(torch.maximum(inputs, start - distance), start + distance)
        return self.domain.nearest(inputs)

    def _flip_features(self, objective: Objective, start: Tensor, targets: Tensor) -> Tensor:
        """Flip the most promising features; if that fails, fewer of them, then others."""
        size = start[0].numel()
        best = start.flatten(1)
        least, gradients = objective(start, targets)
        counts = torch.full((len(start),), self._num_flipped(size), device=start.device)
        failed = torch.zeros_like(best, dtype=torch.bool)
        for step in range(self.num_steps):
            tried = self._choose_flips(best, start.flatten(1), gradients.flatten(1), counts, failed)
            inputs = torch.where(tried, self.domain.flipped(best), best)
            values, new = objective(inputs.view_as(start), targets)
            ok = values < least
            alone = ~ok & (counts == 1)
            failed = (failed | (tried & alone[:, None])) & ~ok[:, None]
            counts = torch.where(ok, counts, (counts // 2).clamp(min=1))
            gradients = torch.where(_expanded(ok, new), new, gradients)
            best, least = _better(best, least, inputs, values)
            self._report(step)
        return best.view_as(start)

    def _num_flipped(self, size: int) -> int:
        share = self.step_size if self.radius is None else min(self.step_size, self.radius)
        return max(1, round(share * size))

    def _choose_flips(
        self, now: Tensor, start: Tensor, gradients: Tensor, counts: Tensor, failed: Tensor
    ) -> Tensor:
        """Choose the features to flip: the ``counts`` most promising allowed ones of each input."""
        promise = -gradients * (self.domain.flipped(now) - now)
        allowed = ~failed
        if self.radius is not None:  # a flipped feature may always be flipped back
            room = max(1, round(self.radius * now.shape[1])) - (now != start).sum(dim=1)
            allowed &= (now != start) | (room >= counts)[:, None]
        promise = promise.masked_fill(~allowed, -torch.inf)
        ranks = promise.argsort(dim=1, descending=True).argsort(dim=1)
        return (ranks < counts[:, None]) & allowed


def _better(best: Tensor, least: Tensor, inputs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the better of the two candidates for each input; NaN is worse than any value."""
    ok = values < least
    return torch.where(_expanded(ok, inputs), inputs, best), torch.where(ok, values, least)


def _expanded(mask: Tensor, other: Tensor) -> Tensor:
    """Return the mask with dimensions of size 1 appended, to broadcast against ``other``."""
    return mask.view(-1, *[1] * (other.dim() - 1))

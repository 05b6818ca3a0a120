"""Craft input canaries: from their description, a model and held-out data to examples.

``Crafting`` does it. It moves inputs through their ``Domain`` by a ``Search`` for where an ``Objective`` is
small: the negative loss, or the cosine of Algorithm 3 of Nasr et al. 2023.
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
from dpaudit.canaries import Adversarial, Blank, Crafted, InputCanary, Mislabelled
from dpaudit.errors import InputError

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From inputs and classes to a number for each, the smaller the better, and its gradient for the input."""
Tell: TypeAlias = Callable[[int, int], None]
"""Called with the number of steps that are done and the number of all steps."""

_AT_ONCE = 128  # held-out examples whose mean gradient is found together
_CHUNK = 16  # canaries: second derivatives of a convolution take much memory
_TINY = 1e-30


def nobody(_done: int, _all: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Crafting:
    """Makes canaries with the model at its current weights, from held-out data.

    ``tell`` is called in each step of a search. The model and torch's global RNG stay as they are.
    """

    model: nn.Module
    loss: Loss
    data: HeldOutData
    max_grad_norm: float
    tell: Tell = nobody

    def __post_init__(self) -> None:
        if not isinstance(self.data, HeldOutData):
            raise InputError(
                f"Expected data that hold_out() split off, got a {type(self.data).__name__}: canaries must "
                "not be made from what the training sees."
            )

    def __call__(self, canary: InputCanary, num_canaries: int, rng: np.random.Generator) -> Examples:
        """Make canaries, each from an example of its own while there are enough."""
        count = len(self.data)
        places = torch.from_numpy(rng.choice(count, num_canaries, replace=num_canaries > count))
        places = places.to(self.data.inputs.device)
        inputs, targets = self.data.inputs.index_select(0, places), self.data.targets.index_select(0, places)
        with torch.random.fork_rng(devices=[]):  # of a model with dropout, say
            return self._made(canary, Examples(inputs, targets), rng)

    def _made(self, canary: InputCanary, chosen: Examples, rng: np.random.Generator) -> Examples:
        match canary:
            case Blank():
                return self._blank(chosen, rng)
            case Mislabelled():
                others = self._classes(1, chosen, rng)
                return Examples(chosen.inputs, (chosen.targets + others) % self.data.num_classes)
            case Adversarial():
                return self._adversarial(canary, chosen)
            case Crafted():
                return self._crafted(canary, chosen)
        raise InputError(f"Expected canary to be such as Crafted(), got {canary!r}.")

    def _blank(self, chosen: Examples, rng: np.random.Generator) -> Examples:
        zeros = Domain.of(self.data).nearest(torch.zeros_like(chosen.inputs))
        return Examples(zeros, self._classes(0, chosen, rng))

    def _classes(self, low: int, like: Examples, rng: np.random.Generator) -> Tensor:
        """Draw a number in [low, num_classes) for each example."""
        return torch.from_numpy(rng.integers(low, self.data.num_classes, len(like))).to(like.targets)

    def _adversarial(self, canary: Adversarial, chosen: Examples) -> Examples:
        search = self._search(canary.num_steps, canary.step_size, canary.radius)
        objective = negative_loss_objective(self.model, self.loss)
        return Examples(search(objective, chosen.inputs, chosen.targets), chosen.targets)

    def _crafted(self, canary: Crafted, chosen: Examples) -> Examples:
        search = self._search(canary.num_steps, canary.step_size)
        reference = mean_gradient(self.model, self.loss, self.data)
        objective = cosine_objective(self.model, self.loss, reference, canary, self.max_grad_norm)
        return Examples(search(objective, chosen.inputs, chosen.targets), chosen.targets)

    def _search(self, num_steps: int, step_size: float, radius: float | None = None) -> Search:
        return Search(
            domain=Domain.of(self.data),
            num_steps=num_steps,
            step_size=step_size,
            radius=radius,
            tell=self.tell,
        )


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs, ready for a model, and their classes."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def negative_loss_objective(model: nn.Module, loss: Loss) -> Objective:
    """Return an objective that is small where the model is wrong."""
    parameters = _parameters(model)

    def value(one: Tensor, target: Tensor) -> Tensor:
        return -_loss_of_one(model, loss, parameters, one, target)

    return _with_gradient(value)


def cosine_objective(
    model: nn.Module, loss: Loss, reference: dict[str, Tensor], canary: Crafted, max_grad_norm: float
) -> Objective:
    """Return the absolute cosine of the example's gradient and a ``reference``: Algorithm 3 of the paper.

    To it is added what ``canary`` wants of the gradient's length.
    """
    parameters = _parameters(model)

    def value(one: Tensor, target: Tensor) -> Tensor:
        gradient = grad(lambda values: _loss_of_one(model, loss, values, one, target))(parameters)
        dot = torch.stack([(part * reference[name]).sum() for name, part in gradient.items()]).sum()
        norm, other = _norm(gradient), _norm(reference)
        found: Tensor = canary.objective((dot / (norm * other)).abs(), norm, max_grad_norm)
        return found

    return _with_gradient(value)


def _with_gradient(value: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Return the objective of a batch, from a function of one input and its class."""
    both: Any = vmap(grad_and_value(value), chunk_size=_CHUNK, randomness="same")

    def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = both(inputs, targets)
        return values.detach(), gradients.detach()

    return objective


def _loss_of_one(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], one: Tensor, target: Tensor
) -> Tensor:
    outputs = functional_call(model, parameters, (one[None],))
    return loss(outputs, target[None])[0]


def mean_gradient(model: nn.Module, loss: Loss, data: HeldOutData) -> dict[str, Tensor]:
    """Return the mean gradient of held-out examples, by the parameters' names."""
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
    """Return the norm, never zero: there a square root has no derivative."""
    return (torch.stack([part.square().sum() for part in parts.values()]).sum() + _TINY).sqrt()


@dataclass(frozen=True, eq=False)
class Domain:
    """From ``low`` to ``high`` in each entry, or only these two values, if features are binary.

    Pixels of an image share one range. Features of a table have one each.
    """

    low: Tensor
    high: Tensor
    is_binary: bool

    @classmethod
    def of(cls, data: HeldOutData) -> Domain:
        """Return the range of held-out examples; the training's own are not read."""
        inputs = data.inputs
        if _has_two_values(inputs):
            return cls(inputs.min(), inputs.max(), is_binary=True)
        if inputs.dim() == 2:
            return cls(inputs.amin(dim=0), inputs.amax(dim=0), is_binary=False)
        return cls(inputs.min(), inputs.max(), is_binary=False)

    @property
    def span(self) -> Tensor:
        """The length of the range: the unit of steps and radii."""
        return self.high - self.low

    def nearest(self, inputs: Tensor) -> Tensor:
        """Return the nearest inputs in the domain; halfway is low."""
        if self.is_binary:
            return torch.where(inputs > (self.low + self.high) / 2, self.high, self.low)
        return inputs.clamp(self.low, self.high)

    def flipped(self, inputs: Tensor) -> Tensor:
        """Return every binary feature as its other value."""
        return self.low + self.high - inputs


def _has_two_values(inputs: Tensor) -> bool:
    low, high = inputs.min(), inputs.max()
    return bool(low < high) and bool(((inputs == low) | (inputs == high)).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """``num_steps`` of ``step_size`` spans each, no further than ``radius`` spans from the start.

    It returns the best input that it met, so that no canary is worse than what it was made from.
    """

    domain: Domain
    num_steps: int
    step_size: float
    radius: float | None = None
    tell: Tell = nobody

    def __call__(self, objective: Objective, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the best inputs near these."""
        moved = self._flip if self.domain.is_binary else self._walk
        return moved(objective, inputs, targets)

    def _walk(self, objective: Objective, start: Tensor, targets: Tensor) -> Tensor:
        """Step along the sign of the gradient: projected gradient descent."""
        inputs = best = start
        values, gradients = objective(inputs, targets)
        least = values
        for step in range(self.num_steps):
            # ever shorter steps: long ones find the region, short ones the minimum
            length = self.step_size * (1 - step / self.num_steps)
            inputs = self._near(start, inputs - length * self.domain.span * gradients.sign())
            values, gradients = objective(inputs, targets)
            best, least = _better(best, least, inputs, values)
            self.tell(step + 1, self.num_steps)
        return best

    def _near(self, start: Tensor, inputs: Tensor) -> Tensor:
        if self.radius is not None:
            reach = self.radius * self.domain.span
            inputs = torch.minimum(torch.maximum(inputs, start - reach), start + reach)
        return self.domain.nearest(inputs)

    def _flip(self, objective: Objective, start: Tensor, targets: Tensor) -> Tensor:
        """Flip the most promising features; where that fails, fewer of them, then others."""
        size = start[0].numel()
        best = start.flatten(1)
        least, gradients = objective(start, targets)
        counts = torch.full((len(start),), self._at_once(size), device=start.device)
        failed = torch.zeros_like(best, dtype=torch.bool)
        for step in range(self.num_steps):
            tried = self._flips(best, start.flatten(1), gradients.flatten(1), counts, failed)
            inputs = torch.where(tried, self.domain.flipped(best), best)
            values, new = objective(inputs.view_as(start), targets)
            ok = values < least
            alone = ~ok & (counts == 1)
            failed = (failed | (tried & alone[:, None])) & ~ok[:, None]
            counts = torch.where(ok, counts, (counts // 2).clamp(min=1))
            gradients = torch.where(_like(ok, new), new, gradients)
            best, least = _better(best, least, inputs, values)
            self.tell(step + 1, self.num_steps)
        return best.view_as(start)

    def _at_once(self, size: int) -> int:
        share = self.step_size if self.radius is None else min(self.step_size, self.radius)
        return max(1, round(share * size))

    def _flips(self, now: Tensor, start: Tensor, gradients: Tensor, counts: Tensor, failed: Tensor) -> Tensor:
        """Return which features to flip: of each input the ``counts`` most promising that are allowed."""
        promise = -gradients * (self.domain.flipped(now) - now)
        allowed = ~failed
        if self.radius is not None:  # one that was flipped may always be flipped back
            room = max(1, round(self.radius * now.shape[1])) - (now != start).sum(dim=1)
            allowed &= (now != start) | (room >= counts)[:, None]
        promise = promise.masked_fill(~allowed, -torch.inf)
        ranks = promise.argsort(dim=1, descending=True).argsort(dim=1)
        return (ranks < counts[:, None]) & allowed


def _better(best: Tensor, least: Tensor, inputs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the better of two for each input; NaN is worse than any value."""
    ok = values < least
    return torch.where(_like(ok, inputs), inputs, best), torch.where(ok, values, least)


def _like(mask: Tensor, other: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (other.dim() - 1))

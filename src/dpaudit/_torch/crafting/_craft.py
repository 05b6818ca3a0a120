"""From the description of an input canary to examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit._torch._held_out import HeldOutData
from dpaudit._torch.crafting._domain import Domain
from dpaudit._torch.crafting._objectives import Cosine, Loss, NegativeLoss, mean_gradient
from dpaudit._torch.crafting._search import Search, Tell, nobody
from dpaudit.canaries import Adversarial, Blank, Crafted, InputCanary, Mislabelled
from dpaudit.errors import InputError

__all__ = ["Crafting", "Examples"]


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs, ready for a model, and their classes."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class Crafting:
    """What canaries are made with: the model at its present weights, and held-out data.

    ``tell`` hears of each step of a search. The model and torch's own chance stay as they are.
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
        """So many canaries, each from an example of its own while there are enough."""
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
        """A number from ``low`` on and below the number of classes for each example."""
        return torch.from_numpy(rng.integers(low, self.data.num_classes, len(like))).to(like.targets)

    def _adversarial(self, canary: Adversarial, chosen: Examples) -> Examples:
        search = self._search(canary.num_steps, canary.step_size, canary.radius)
        objective = NegativeLoss(self.model, self.loss)
        return Examples(search(objective, chosen.inputs, chosen.targets), chosen.targets)

    def _crafted(self, canary: Crafted, chosen: Examples) -> Examples:
        search = self._search(canary.num_steps, canary.step_size)
        reference = mean_gradient(self.model, self.loss, self.data)
        objective = Cosine(self.model, self.loss, reference, canary=canary, max_grad_norm=self.max_grad_norm)
        return Examples(search(objective, chosen.inputs, chosen.targets), chosen.targets)

    def _search(self, num_steps: int, step_size: float, radius: float | None = None) -> Search:
        return Search(
            domain=Domain.of(self.data),
            num_steps=num_steps,
            step_size=step_size,
            radius=radius,
            tell=self.tell,
        )

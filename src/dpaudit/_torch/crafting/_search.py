"""How an input is moved through its domain to where an objective is small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dpaudit._torch.crafting._domain import Domain
from dpaudit._torch.crafting._objectives import Objective

__all__ = ["Search", "Tell", "nobody"]

Tell: TypeAlias = Callable[[int, int], None]
"""Is told how many of all steps are done."""


def nobody(_done: int, _all: int) -> None:
    """Is told, and does nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """``num_steps`` of ``step_size`` spans each, no further than ``radius`` spans from the start.

    What it returns is the best input that it met, so that no canary is worse than what it was made from.
    """

    domain: Domain
    num_steps: int
    step_size: float
    radius: float | None = None
    tell: Tell = nobody

    def __call__(self, objective: Objective, inputs: Tensor, targets: Tensor) -> Tensor:
        """The best inputs near these."""
        moved = self._flip if self.domain.is_binary else self._walk
        return moved(objective, inputs, targets)

    def _walk(self, objective: Objective, start: Tensor, targets: Tensor) -> Tensor:
        """Steps along the sign of the gradient, as projected gradient descent does."""
        inputs = best = start
        values, gradients = objective(inputs, targets)
        least = values
        for step in range(self.num_steps):
            # shorter and shorter: long steps find the place, short ones the bottom
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
        """Flip those features that promise most; where that fails, fewer of them, then others."""
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
        """Which features to flip: the most promising that are allowed, so many of each input."""
        promise = -gradients * (self.domain.flipped(now) - now)
        allowed = ~failed
        if self.radius is not None:  # one that was flipped may always be flipped back
            room = max(1, round(self.radius * now.shape[1])) - (now != start).sum(dim=1)
            allowed &= (now != start) | (room >= counts)[:, None]
        promise = promise.masked_fill(~allowed, -torch.inf)
        ranks = promise.argsort(dim=1, descending=True).argsort(dim=1)
        return (ranks < counts[:, None]) & allowed


def _better(best: Tensor, least: Tensor, inputs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The better of two for each input; a value that is not a number is worse than any."""
    ok = values < least
    return torch.where(_like(ok, inputs), inputs, best), torch.where(ok, values, least)


def _like(mask: Tensor, other: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (other.dim() - 1))

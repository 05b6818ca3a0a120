"""Input canaries: examples that join a step through the model, the loss and the clipping of Opacus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit._torch import HeldOutData
from dpaudit._torch.crafting import Crafting, Examples
from dpaudit.canaries import Coins, InputCanary
from dpaudit.errors import InputError
from dpaudit.observers.opacus._look import Canaries, Look
from dpaudit.observers.opacus._model import Model
from dpaudit.observers.opacus._passes import Pass
from dpaudit.stats._types import IntArray

__all__ = ["InputCanaries"]

_CRAFTING = 4  # a purpose of chance, besides those of Draws and of entries
_SHORTEST = 1e-12  # in clipping norms: along a gradient that is shorter nothing can be said
_ROOM = 1e-3  # of the largest numbers, far above the rounding of sums


@dataclass(frozen=True, eq=False)
class _Along(Look):
    """The gradient of each canary, as long as the claim lets it be."""

    directions: Tensor  # canaries x parameters
    squares: Tensor
    of_others: Tensor
    reach: float

    @classmethod
    def of(cls, directions: Tensor, joined: Tensor, alone: Tensor, reach: float) -> _Along:
        """Where ``joined`` canaries, by number, added ``alone`` each; ``reach`` is the most that one may."""
        norms = torch.linalg.vector_norm(directions, dim=1)
        can_tell = norms.isfinite() & (norms > _SHORTEST * reach)
        directions = directions.masked_fill(~can_tell[:, None], 0.0)
        squares = torch.where(can_tell, norms.square(), 1.0)
        of_all = directions @ alone.sum(dim=0)
        own = torch.zeros_like(of_all).index_copy_(0, joined, (directions[joined] * alone).sum(dim=1))
        return cls(directions, squares, (of_all - own) / squares, reach)

    def project(self, vector: Tensor) -> Tensor:
        return self.directions @ vector / self.squares

    @property
    def others(self) -> Tensor:
        return self.of_others


class InputCanaries(Canaries):
    """Examples, made before the first step and anew when it is time for it.

    The direction of a canary is its gradient at the weights of the step, found apart from the library and
    clipped to the norm that the optimizer claims. What joins the sum is what the library makes of it.
    A score is what was released along the direction over its squared length, without the batch and without
    the other canaries: 1 where the canary is, and more where it was not clipped.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        canary: InputCanary,
        coins: Coins,
        *,
        model: Model,
        own: Pass,
        data: HeldOutData,
    ) -> None:
        self._optimizer, self._canary, self._coins = optimizer, canary, coins
        self._model, self._own = model, own
        self._data = data.to(optimizer.params[0].device)
        self._examples: Examples | None = None
        self._made_at: int | None = None
        self.num_canaries = coins.num_canaries

    def join(self, index: int, numbers: IntArray, *, inserts: bool) -> Look:
        assert inserts  # several processes are refused
        examples = self.examples(index)
        directions = _clipped(self._model.gradients(examples), self._optimizer)
        joined = torch.as_tensor(numbers, device=directions.device)
        alone = directions.new_zeros(0, directions.shape[1])
        if len(joined):
            before = self._sum()
            alone = self._own.join(Examples(examples.inputs[joined], examples.targets[joined]))
            _require_apart(self._sum() - before, alone, before)
        return _Along.of(directions, joined, alone, float(self._optimizer.max_grad_norm))

    def examples(self, index: int) -> Examples:
        """The canaries of a step."""
        if self._examples is None or self._canary.is_due(index, self._made_at):
            self._examples, self._made_at = self._craft(index), index
        return self._examples

    def _craft(self, index: int) -> Examples:
        crafting = Crafting(
            model=self._model.module,
            loss=self._model.loss,
            data=self._data,
            max_grad_norm=float(self._optimizer.max_grad_norm),
        )
        with self._model.without_hooks():
            return crafting(self._canary, self.num_canaries, self._coins.chance(index, _CRAFTING))

    def _sum(self) -> Tensor:
        parts: list[Tensor] = [parameter.summed_grad for parameter in self._optimizer.params]
        return torch.cat([part.reshape(-1) for part in parts])


def _clipped(parts: list[Tensor], optimizer: DPOptimizer) -> Tensor:
    """Gradients as the optimizer claims to clip them: each layer by its own norm, or all layers together."""
    norms = getattr(optimizer, "max_grad_norms", None)
    if norms is None:
        return _shortened(torch.cat(parts, dim=1), float(optimizer.max_grad_norm))
    layers = zip(parts, norms, strict=True)
    return torch.cat([_shortened(part, float(norm)) for part, norm in layers], dim=1)


def _shortened(rows: Tensor, norm: float) -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    shortened: Tensor = rows * (norm / lengths.clamp(min=norm))
    return shortened


def _require_apart(together: Tensor, alone: Tensor, batch: Tensor) -> None:
    """What a canary adds must not depend on the others: else nobody can take them off."""
    largest = max(float(alone.abs().max()), float(batch.abs().max()))
    off = float((together - alone.sum(dim=0)).abs().max())
    if off > _ROOM * largest * len(alone):
        raise InputError(
            f"Expected each example to be clipped by itself, but {len(alone)} canaries together add another "
            f"sum than one by one, off by {off:.3g}: examples act on each other (replay_step shows that), or "
            "the model has chance of its own, such as dropout."
        )

"""Ways in which DP-SGD really went wrong, to be put into a training: an audit has to see them.

Each is a broken ``mechanism`` or ``sampling`` for :class:`dpaudit.training.Training`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit.training._mechanism import GaussianSum
from dpaudit.training.gradients._rows import Rows

__all__ = ["ClippedAfterMean", "NoiseTooSmall", "ShuffledBatches", "Unclipped"]


@dataclass(frozen=True, kw_only=True)
class NoiseTooSmall(GaussianSum):
    """The noise is ``factor`` times what it should be (the paper's third violation)."""

    factor: float = 0.8

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return super().noise(like, generator).mul_(self.factor)


@dataclass(frozen=True, kw_only=True)
class Unclipped(GaussianSum):
    """Gradients are added as they are."""

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        norms = [out.new_zeros(0)]
        for chunk in rows:
            norms.append(chunk.norms())
            chunk.add_weighted(torch.ones_like(norms[-1]), out)
        return torch.cat(norms)


@dataclass(frozen=True, kw_only=True)
class ClippedAfterMean(Unclipped):
    """The mean is clipped instead of every gradient (the paper's first violation)."""

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:
        mean_norm = float(total.norm()) / max(num_gradients, 1)
        return total if mean_norm <= self.max_grad_norm else total * (self.max_grad_norm / mean_norm)


@dataclass
class ShuffledBatches:
    """Every epoch is shuffled and cut into batches, while Poisson sampling is accounted for.

    It keeps the rest of its epoch, so that one object belongs to one training.
    """

    sample_rate: float
    _left: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        _validate.sample_rate(self.sample_rate)

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:
        if not self._left:
            order = torch.randperm(num_examples, generator=generator)
            self._left = list(order.tensor_split(round(1 / self.sample_rate)))
        return self._left.pop().sort().values

    def state_dict(self) -> dict[str, Any]:
        """The batches that are left of this epoch."""
        return {"left": list(self._left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these."""
        self._left = list(state["left"])

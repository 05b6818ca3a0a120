"""Gradients that remember what a mechanism made of them."""

from __future__ import annotations

from torch import Tensor

from dpaudit.training.gradients._rows import Rows

__all__ = ["WeighedRows"]


class WeighedRows:
    """The gradients of some examples, and what a mechanism multiplied each with when it added them.

    The others that joined a step are known to the adversary, as the mechanism added them: also where it
    does not clip as it should.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.weights: Tensor | None = None

    def norms(self) -> Tensor:
        return self._rows.norms()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        self.weights = weights if self.weights is None else self.weights + weights
        self._rows.add_weighted(weights, out)

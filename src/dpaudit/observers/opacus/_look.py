"""Where the canaries of a step are looked for in what it releases."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dpaudit.stats._types import IntArray

__all__ = ["Canaries", "Look"]


class Look(ABC):
    """One direction for each canary, in units of what the canary may add to the sum."""

    reach: float
    """What one example may add, where the canaries are."""

    @abstractmethod
    def project(self, vector: Tensor) -> Tensor:
        """How much of each canary is in ``vector``: 1 if it is the canary itself."""

    @property
    def others(self) -> Tensor | float:
        """How much the other canaries of the step are along each; nothing, if they are orthogonal."""
        return 0.0


class Canaries(ABC):
    """What joins the steps of an optimizer."""

    num_canaries: int

    @abstractmethod
    def join(self, index: int, numbers: IntArray, *, inserts: bool) -> Look:
        """Let those with these numbers join ``p.summed_grad`` by the library's own code, if it ``inserts``.

        Returns where all of them are to be looked for.
        """

"""What an audit needs to know of a claim."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["Claimed", "Hypothesis"]


@dataclass(frozen=True)
class Hypothesis:
    """The claim as seen by one observation: a curve, and what a bound on it means for the whole."""

    tradeoff: TradeOff
    parameter: float
    epsilon: Callable[[float], float]  # from a bound on the parameter to the claim's own epsilon
    assumptions: tuple[str, ...] = ()
    condition: str | None = None  # what a refutation needs besides the data; None if the claim implies it


class Claimed(ABC):
    """What a training says of itself. The one implementation is :class:`dpaudit.Claim`."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The claim in a line."""

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """The claimed epsilon at the claim's delta."""

    @property
    @abstractmethod
    def delta(self) -> float:
        """The claim's delta."""

    @abstractmethod
    def hypothesis(self, tradeoff: TradeOff | None) -> Hypothesis:
        """The claim in terms of ``tradeoff``; of its own, if None."""

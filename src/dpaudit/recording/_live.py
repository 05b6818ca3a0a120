"""The bound while the training runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LiveBound"]


@dataclass(frozen=True, kw_only=True)
class LiveBound:
    """A lower bound that holds at this and at every other moment of the run, all together.

    So the run may be stopped because of what it says.
    """

    num_done: int
    epsilon: float
    claimed_epsilon: float
    delta: float
    confidence: float
    is_violation: bool

    def __str__(self) -> str:
        relation = ">" if self.is_violation else "of"
        return f"epsilon >= {self.epsilon:.3g} {relation} {self.claimed_epsilon:.3g} claimed"

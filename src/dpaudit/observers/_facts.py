"""What an observer knows of a training besides its claim."""

from __future__ import annotations

from dataclasses import dataclass

from dpaudit.canaries import GradientCanary, InputCanary

__all__ = ["Facts", "scale_of"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Numbers of the training that a mistake may leave in its scores: for guesses at what went wrong."""

    canary: GradientCanary | InputCanary
    max_grad_norm: float | None = None
    batch_size: float | None = None

    @property
    def canary_scale(self) -> float | None:
        """How long the canary is, in clipping norms; None for an example, whose gradient is as it is."""
        return self.canary.scale if isinstance(self.canary, GradientCanary) else None


def scale_of(canary: GradientCanary | InputCanary) -> float:
    """How long a canary is before clipping, in clipping norms; an example is scored by what it is."""
    return canary.scale if isinstance(canary, GradientCanary) else 1.0

"""What an observer knows of a training besides its claim."""

from __future__ import annotations

from dataclasses import dataclass

from dpaudit.canaries import GradientCanary

__all__ = ["Facts"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Numbers of the training that a mistake may leave in its scores: for guesses at what went wrong."""

    canary: GradientCanary
    max_grad_norm: float | None = None
    batch_size: float | None = None

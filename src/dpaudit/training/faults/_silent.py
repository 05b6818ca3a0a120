"""A training that is not private at all."""

from __future__ import annotations

from dataclasses import dataclass

from dpaudit.training.faults._clipping import Unclipped
from dpaudit.training.faults._noise import Noiseless

__all__ = ["Silent"]


@dataclass(frozen=True, kw_only=True)
class Silent(Noiseless, Unclipped):
    """Neither clips nor adds noise: the private step was never called."""

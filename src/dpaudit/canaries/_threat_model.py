"""What the adversary of an audit may do and see."""

from __future__ import annotations

from enum import Enum

__all__ = ["ThreatModel"]


class ThreatModel(Enum):
    """What the adversary inserts, and what it sees; section 3 of Nasr et al. 2023."""

    GRADIENT = "gradient"
    """Inserts a gradient, sees the private gradient of every step."""
    INPUT = "input"
    """Inserts an example, sees the private gradient of every step."""
    BLACK_BOX = "black-box"
    """Inserts an example, sees what the final model answers."""

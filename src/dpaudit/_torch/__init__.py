"""What the native training and the observers of torch libraries share."""

from dpaudit._torch._held_out import HeldOutData, fingerprints, held_out, require_fitting
from dpaudit._torch._vectors import CanaryVectors

__all__ = ["CanaryVectors", "HeldOutData", "fingerprints", "held_out", "require_fitting"]

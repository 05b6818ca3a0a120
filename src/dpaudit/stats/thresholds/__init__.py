"""Threshold rules: where to call a score "present"."""

from dpaudit.stats.thresholds._base import ThresholdRule
from dpaudit.stats.thresholds._fixed import Fixed, Optimal
from dpaudit.stats.thresholds._held_out import HeldOut
from dpaudit.stats.thresholds._predictable import Predictable
from dpaudit.stats.thresholds._same_data import SameData
from dpaudit.stats.thresholds._simultaneous import Simultaneous

__all__ = [
    "Fixed",
    "HeldOut",
    "Optimal",
    "Predictable",
    "SameData",
    "Simultaneous",
    "ThresholdRule",
]

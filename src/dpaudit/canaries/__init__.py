"""What an audit inserts into a training: frozen descriptions, free of any framework."""

from dpaudit.canaries._directions import Directions
from dpaudit.canaries._draws import Draws, fresh_seed
from dpaudit.canaries._gradients import Constant, Dirac, GradientCanary, Mixed, RandomDirection
from dpaudit.canaries._threat_model import ThreatModel

__all__ = [
    "Constant",
    "Dirac",
    "Directions",
    "Draws",
    "GradientCanary",
    "Mixed",
    "RandomDirection",
    "ThreatModel",
    "fresh_seed",
]

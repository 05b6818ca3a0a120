"""What an audit inserts into a training: frozen descriptions, free of any framework."""

from dpaudit.canaries._gradients import Constant, Dirac, Directions, GradientCanary, Mixed, RandomDirection
from dpaudit.canaries._inputs import (
    Adversarial,
    Blank,
    Crafted,
    InputCanary,
    Mislabelled,
    ThreatModel,
    split_places,
)
from dpaudit.canaries._randomness import Coins, Draws, fresh_seed

__all__ = [
    "Adversarial",
    "Blank",
    "Coins",
    "Constant",
    "Crafted",
    "Dirac",
    "Directions",
    "Draws",
    "GradientCanary",
    "InputCanary",
    "Mislabelled",
    "Mixed",
    "RandomDirection",
    "ThreatModel",
    "fresh_seed",
    "split_places",
]

"""What an audit inserts into a training: frozen descriptions, free of any framework."""

from dpaudit.canaries._directions import Directions
from dpaudit.canaries._draws import Coins, Draws, fresh_seed
from dpaudit.canaries._gradients import Constant, Dirac, GradientCanary, Mixed, RandomDirection
from dpaudit.canaries._held_out import split_places
from dpaudit.canaries._inputs import Adversarial, Blank, Crafted, InputCanary, Mislabelled
from dpaudit.canaries._threat_model import ThreatModel

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

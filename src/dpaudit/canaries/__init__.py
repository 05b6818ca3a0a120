"""Canaries, the examples or gradients that an audit inserts: frozen, framework-independent descriptions."""

from dpaudit.canaries._gradients import (
    SHAPES,
    CanaryLabels,
    Constant,
    Dirac,
    Directions,
    GradientCanary,
    Mixed,
    ParameterLayout,
    RandomDirection,
    SharedPlaces,
)
from dpaudit.canaries._inputs import (
    Adversarial,
    Blank,
    Crafted,
    HeldOutExamples,
    InputCanary,
    Mislabelled,
    ThreatModel,
    fingerprints,
    refuse_held_out,
    require_held_out,
    split_indices,
    unseen_indices,
)
from dpaudit.canaries._mixture import Mixture
from dpaudit.canaries._randomness import Coins, Draws, fresh_seed

__all__ = [
    "SHAPES",
    "Adversarial",
    "Blank",
    "CanaryLabels",
    "Coins",
    "Constant",
    "Crafted",
    "Dirac",
    "Directions",
    "Draws",
    "GradientCanary",
    "HeldOutExamples",
    "InputCanary",
    "Mislabelled",
    "Mixed",
    "Mixture",
    "ParameterLayout",
    "RandomDirection",
    "SharedPlaces",
    "ThreatModel",
    "fingerprints",
    "fresh_seed",
    "refuse_held_out",
    "require_held_out",
    "split_indices",
    "unseen_indices",
]

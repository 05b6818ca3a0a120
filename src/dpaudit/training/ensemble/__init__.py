"""Many small models at once, each with DP-SGD of its own: the engine of black-box audits."""

from dpaudit.training.ensemble._ensemble import Ensemble
from dpaudit.training.ensemble._example import Example
from dpaudit.training.ensemble._scores import Score, log_odds, negative_loss
from dpaudit.training.ensemble._trained import TrainedModels

__all__ = [
    "Ensemble",
    "Example",
    "Score",
    "TrainedModels",
    "log_odds",
    "negative_loss",
]

"""Many small models at once, each with DP-SGD of its own: the engine of black-box audits."""

from dpaudit.training.ensemble._clip_bkd import clip_bkd
from dpaudit.training.ensemble._ensemble import Ensemble
from dpaudit.training.ensemble._example import Example
from dpaudit.training.ensemble._pretrain import pretrained_weights
from dpaudit.training.ensemble._scores import Score, log_odds, negative_loss
from dpaudit.training.ensemble._trained import TrainedModels, with_weights

__all__ = [
    "Ensemble",
    "Example",
    "Score",
    "TrainedModels",
    "clip_bkd",
    "log_odds",
    "negative_loss",
    "pretrained_weights",
    "with_weights",
]

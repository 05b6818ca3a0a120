"""Many small models trained together, each with its own DP-SGD: the engine of black-box audits."""

from dpaudit.training.ensemble._ensemble import Ensemble
from dpaudit.training.ensemble._models import (
    Example,
    Score,
    TrainedModels,
    clip_bkd,
    log_odds,
    negative_loss,
    pretrained_weights,
    with_weights,
)

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

"""DP-SGD for audits: per-example gradients, a training loop with hooks, models and data.

Requires torch.
"""

from dpaudit.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401  # fail here, with the command that installs it
except ImportError as _error:
    raise MissingExtraError("Training", "torch pydantic") from _error

from dpaudit.training._settings import (
    DPSGD,
    SGD,
    Adam,
    Augmentation,
    FlipAndCrop,
    GaussianSum,
    Optimizer,
    PoissonSampling,
    PrivateSum,
    Sampler,
    Seeds,
    generator,
    initialize,
)
from dpaudit.training._training import Diagnose, Hook, Step, Training, accuracy
from dpaudit.training.audits import EndToEnd, OneRun, TwoBatches
from dpaudit.training.gradients import Batch, cross_entropy

__all__ = [
    "DPSGD",
    "SGD",
    "Adam",
    "Augmentation",
    "Batch",
    "Diagnose",
    "EndToEnd",
    "FlipAndCrop",
    "GaussianSum",
    "Hook",
    "OneRun",
    "Optimizer",
    "PoissonSampling",
    "PrivateSum",
    "Sampler",
    "Seeds",
    "Step",
    "Training",
    "TwoBatches",
    "accuracy",
    "cross_entropy",
    "generator",
    "initialize",
]

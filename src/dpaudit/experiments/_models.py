"""The model that a config names, for given data."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from dpaudit.errors import InputError
from dpaudit.experiments.config import Mlp, ModelConfig
from dpaudit.training.data import Dataset
from dpaudit.training.models import conv_net, logistic_regression, mlp, purchase_mlp, wide_resnet

__all__ = ["model_for"]

_SMALLEST = 8  # pixels a side that a convolutional network can halve often enough
_PURCHASE = 600, 100  # features and classes


def model_for(config: ModelConfig, data: Dataset) -> Callable[[], nn.Module]:
    """What builds the model; sizes of inputs and outputs are those of the data."""
    features, classes = math.prod(data.shape), data.num_classes
    if isinstance(config, Mlp):
        return lambda: mlp(features, *config.hidden, classes)
    if config.name == "logistic-regression":
        return lambda: logistic_regression(features, classes)
    if config.name == "purchase-mlp":
        _require((features, classes) == _PURCHASE, config.name, "600 features and 100 classes", data)
        return purchase_mlp
    images = len(data.shape) == 3 and min(data.shape[1:]) >= _SMALLEST
    _require(images, config.name, f"images of at least {_SMALLEST} x {_SMALLEST} pixels", data)
    channels = data.shape[0]
    if config.name == "conv-net":
        return lambda: conv_net(in_channels=channels, num_classes=classes)
    depth = {"wide-resnet-16-4": 16, "wide-resnet-40-4": 40}[config.name]
    return lambda: wide_resnet(depth, 4, in_channels=channels, num_classes=classes)


def _require(ok: bool, model: str, expected: str, data: Dataset) -> None:
    if not ok:
        raise InputError(f"Expected data with {expected} for the model {model}, got {data!r}.")

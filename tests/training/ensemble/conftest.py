"""Small ensembles on the embedded digits."""

import pytest
import torch

from dpaudit.training import DPSGD, SGD
from dpaudit.training.data import Dataset, digits
from dpaudit.training.ensemble import Ensemble, Example
from dpaudit.training.models import mlp


@pytest.fixture
def data() -> Dataset:
    return digits().split(200)[0]


@pytest.fixture
def make(data):
    """An ensemble; what is not said is small."""

    def build(**options):
        settings = {
            "noise_multiplier": 1.0,
            "max_grad_norm": 0.5,
            "sample_rate": 0.1,
            "num_steps": 6,
            "optimizer": SGD(learning_rate=0.5),
        }
        changed = {name: options.pop(name) for name in list(options) if name in settings}
        chosen = {
            "build": lambda: mlp(64, 16, 10),
            "data": data,
            "canary": Example(torch.full((1, 8, 8), 0.5), 3),
            "settings": DPSGD(**(settings | changed)),
        }
        return Ensemble(**(chosen | options))

    return build

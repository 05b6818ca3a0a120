"""Short trainings of the embedded digits, to be audited."""

import pytest
import torch
from digits_training import dpsgd_training, finished

from dpaudit.training.models import mlp


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train():
    """Train with an audit as a hook; returns the finished training."""

    def run(audit=None, *, num_steps=300, build=lambda: mlp(64, 128, 10), **options):
        hooks = audit if isinstance(audit, list) else [audit] if audit else []
        return finished(dpsgd_training(*hooks, num_steps=num_steps, build=build, **options))

    return run

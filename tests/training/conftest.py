"""Short trainings of the embedded digits, to be audited."""

import pytest
import torch

import dpaudit
from dpaudit.training import DPSGD, SGD, Seeds, Training, initialize
from dpaudit.training.data import digits
from dpaudit.training.models import mlp

DELTA = 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train():
    """Train with an audit as a hook; returns the finished training."""

    def run(
        audit=None,
        *,
        epsilon=8.0,
        noise_multiplier=None,
        sample_rate=0.1,
        num_steps=300,
        seed=0,
        fault=None,
        sampling=None,
        build=lambda: mlp(64, 128, 10),
        data=None,
    ):
        noise = noise_multiplier or dpaudit.noise_for_epsilon(
            epsilon, sample_rate=sample_rate, num_steps=num_steps, delta=DELTA
        )
        settings = DPSGD(
            noise_multiplier=noise,
            max_grad_norm=1.0,
            sample_rate=sample_rate,
            num_steps=num_steps,
            optimizer=SGD(learning_rate=0.5),
        )
        seeds = Seeds.of(seed)
        training = Training(
            initialize(build, seeds.initialization),
            data or digits().split(1500)[0],
            settings,
            seeds=seeds,
            hooks=audit if isinstance(audit, list) else [audit] if audit else [],
            mechanism=fault and fault(noise_multiplier=noise, max_grad_norm=1.0),
            sampling=sampling and sampling(sample_rate),
        )
        for _ in training.run():
            pass
        return training

    return run

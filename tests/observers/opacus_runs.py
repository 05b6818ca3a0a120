"""Pieces of short trainings with Opacus."""

import itertools

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import TensorDataset

DELTA = 1e-5


def small_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def small_data(num_examples):
    inputs = torch.randn(num_examples, 8)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def weights(model):
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


def run(made, num_steps, loader=None):
    """The loop that people write; a step is one of the optimizer inside."""
    epochs = itertools.chain.from_iterable(itertools.repeat(made.loader if loader is None else loader))
    for inputs, targets in epochs:
        made.optimizer.zero_grad()
        made.criterion(made.model(inputs), targets).backward()
        made.optimizer.step()
        num_steps -= not made.optimizer._is_last_step_skipped
        if num_steps == 0:
            return


def without_clipping(optimizer):
    for value in optimizer.params:
        rows = optimizer._get_flat_grad_sample(value)
        value.summed_grad = rows.sum(0) if value.summed_grad is None else value.summed_grad + rows.sum(0)


def without_noise(optimizer):
    for value in optimizer.params:
        value.grad = value.summed_grad.view_as(value)


def with_less_noise(optimizer, original=DPOptimizer.add_noise):
    claimed = optimizer.noise_multiplier
    optimizer.noise_multiplier = 0.8 * claimed
    original(optimizer)
    optimizer.noise_multiplier = claimed


FAULTS = {
    "no clipping": ("clip_and_accumulate", without_clipping),
    "no noise": ("add_noise", without_noise),
    "noise times 0.8": ("add_noise", with_less_noise),
}

"""Pieces of short trainings with Opacus."""

import itertools
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Made:
    """What make_private made."""

    model: Any
    optimizer: Any
    criterion: Any
    loader: Any
    ghost: bool

    @classmethod
    def of(cls, made, criterion):
        """With ghost clipping there is a criterion among it."""
        model, optimizer, *own, loader = made
        return cls(model, optimizer, own[0] if own else criterion, loader, bool(own))


def weights(model):
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


def train_step(made, inputs, targets):
    made.optimizer.zero_grad()
    made.criterion(made.model(inputs), targets).backward()
    made.optimizer.step()


def run(made, num_steps, loader=None):
    """The loop that people write; a step is one of the optimizer inside."""
    epochs = itertools.chain.from_iterable(itertools.repeat(made.loader if loader is None else loader))
    for inputs, targets in epochs:
        train_step(made, inputs, targets)
        num_steps -= not made.optimizer._is_last_step_skipped
        if num_steps == 0:
            return


def without_clipping(optimizer):
    for value in optimizer.params:
        rows = optimizer._get_flat_grad_sample(value)
        value.summed_grad = rows.sum(0) if value.summed_grad is None else value.summed_grad + rows.sum(0)


def clipping_the_mean(optimizer):
    rows = [optimizer._get_flat_grad_sample(value) for value in optimizer.params]
    sums = [one.sum(0) for one in rows]
    norm = float(torch.stack([one.norm() for one in sums]).norm()) / max(len(rows[0]), 1)
    factor = min(1.0, optimizer.max_grad_norm / max(norm, 1e-9))
    for value, own in zip(optimizer.params, sums, strict=True):
        before = 0.0 if value.summed_grad is None else value.summed_grad
        value.summed_grad = before + factor * own


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
    "clipping of the mean": ("clip_and_accumulate", clipping_the_mean),
    "no noise": ("add_noise", without_noise),
    "noise times 0.8": ("add_noise", with_less_noise),
}

# ways to find and clip gradients, besides hooks and flat clipping
OTHER_KINDS = {
    "functorch": {"grad_sample_mode": "functorch"},
    "ew": {"grad_sample_mode": "ew"},
    "ghost": {"grad_sample_mode": "ghost"},
    "per-layer clipping": {"clipping": "per_layer", "max_grad_norm": [0.2, 0.3, 0.6, 0.7]},
    "adaptive clipping": {
        "clipping": "adaptive",
        "batch_size": 20,
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.3,
        "max_clipbound": 10.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 2.0,
    },
}

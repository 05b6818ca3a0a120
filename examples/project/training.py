"""The training code of the project: a classifier of digits, trained by DP-SGD with Opacus."""

import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.training.data import digits


def private_parts() -> tuple[nn.Module, DPOptimizer, DPDataLoader]:
    data, _ = digits().split(1500)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(data.inputs, data.targets), batch_size=75),
        noise_multiplier=0.9,
        max_grad_norm=1.0,
    )


def train(model: nn.Module, optimizer: DPOptimizer, loader: DPDataLoader, *, num_epochs: int) -> None:
    for _ in range(num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


if __name__ == "__main__":
    train(*private_parts(), num_epochs=15)

"""Audit Opacus training: state the claim, wrap the loop in `observe`, and print the verdict."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpaudit
from dpaudit.opacus import observe
from dpaudit.training.data import digits

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.9, sample_rate=0.05, num_steps=100, delta=1e-5)


def train(*, is_broken: bool = False) -> dpaudit.Result:
    torch.manual_seed(1)
    data, _ = digits().split(1500)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(data.inputs, data.targets), batch_size=75),
        noise_multiplier=0.9,
        max_grad_norm=1.0,
    )
    if is_broken:
        optimizer.noise_multiplier = 0.7  # after the accounting
    with observe(optimizer, claim=CLAIM, loader=loader, module=model, seed=1) as recorder:
        for _ in range(5):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    return recorder.audit()


if __name__ == "__main__":
    print(train())
    print(train(is_broken=True))

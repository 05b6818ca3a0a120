"""Audit training with Opacus: only an import and the `with` line are added to the training code."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpaudit
from dpaudit.observers.opacus import observe
from dpaudit.training.data import digits

torch.manual_seed(1)
train, _ = digits().split(1500)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(train.inputs, train.targets), batch_size=75)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.9, max_grad_norm=1.0
)
criterion = nn.CrossEntropyLoss()

with observe(optimizer, loader=loader, canary=dpaudit.Dirac(), num_canaries=512, seed=1) as recorder:
    for _ in range(15):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

result = recorder.audit(delta=1e-5)
print(result)
result.raise_for_violation()

"""Audit training with Lightning: one callback, and the private optimizer of Opacus."""

import torch
from lightning.pytorch import LightningModule, Trainer
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpaudit
from dpaudit.integrations.lightning import AuditCallback
from dpaudit.training.data import digits

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.9, sample_rate=0.05, num_steps=100, delta=1e-5)


class PrivateModule(LightningModule):
    """A model and its optimizer, as ``make_private`` returned them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.model(inputs), targets)


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
    audit = AuditCallback(claim=CLAIM, loader=loader, seed=1)
    trainer = Trainer(
        max_steps=100, callbacks=[audit], accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(PrivateModule(model, optimizer), loader)
    return audit.audit()


if __name__ == "__main__":
    print(train())
    print(train(is_broken=True))

"""Audit a loop with Accelerate: LoRA on a tiny BERT, with ghost clipping of Opacus."""

import torch
from accelerate import Accelerator
from opacus import PrivacyEngine
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import dpaudit
from dpaudit.opacus import observe

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.787, sample_rate=0.05, num_steps=100, delta=1e-5)


def train(*, is_broken: bool = False) -> dpaudit.Result:
    torch.manual_seed(1)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    lora = LoraConfig(r=8, target_modules=["query", "value", "dense"])
    model = get_peft_model(BertForSequenceClassification(config), lora).train()
    tokens = torch.randint(0, 64, (400, 12))
    data = TensorDataset(tokens, (tokens[:, 0] > 31).long())
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=0.787,
        max_grad_norm=0.1,
        grad_sample_mode="ghost",
    )
    if is_broken:
        optimizer.noise_multiplier = 0.55  # after the accounting
    model, optimizer, loader = Accelerator(cpu=True).prepare(model, optimizer, loader)
    with observe(optimizer, claim=CLAIM, loader=loader, module=model, seed=1) as recorder:
        for _ in range(5):
            for inputs, targets in loader:
                optimizer.zero_grad()
                criterion(model(inputs).logits, targets).backward()
                optimizer.step()
    return recorder.audit()


if __name__ == "__main__":
    print(train())
    print(train(is_broken=True))

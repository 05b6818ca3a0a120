"""Audit the Hugging Face Trainer: LoRA on a tiny GPT-2, with the private optimizer of Opacus."""

import torch
from opacus import PrivacyEngine
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import dpaudit
from dpaudit.integrations.transformers import observe_trainer

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.787, sample_rate=0.05, num_steps=100, delta=1e-5)


class PrivateTrainer(Trainer):
    """A trainer whose batches are those of ``make_private``, which the accountant assumes."""

    loader: DataLoader

    def get_train_dataloader(self) -> DataLoader:
        return self.loader


class ClearGradients(TrainerCallback):
    """What Opacus needs after each step: Trainer only clears the gradients of the model."""

    def on_step_end(self, *_, optimizer, **_parts) -> None:
        optimizer.zero_grad()


def train(*, is_broken: bool = False) -> dpaudit.Result:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora).train()
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (400, 12))]
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=0.787,
        max_grad_norm=0.1,
    )
    if is_broken:
        optimizer.noise_multiplier = 0.55  # after the accounting
    settings = TrainingArguments(max_steps=100, use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = PrivateTrainer(model, settings, optimizers=(optimizer, None), callbacks=[ClearGradients])
    trainer.loader = loader
    with observe_trainer(trainer, claim=CLAIM, seed=1) as training:
        trainer.train()
    return training.audit()


if __name__ == "__main__":
    print(train())
    print(train(is_broken=True))

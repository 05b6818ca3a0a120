"""LoRA on a tiny language model, in each mode of Opacus that has a loss for each sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import dpaudit
from dpaudit.opacus import observe

STEPS = 60
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.787, sample_rate=0.05, num_steps=STEPS, delta=1e-5)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def audited(fault: str = "", *, mode: str = "hooks", dtype: Any = None, is_autocast: bool = False) -> Any:
    """Train and audit; return the recorder, and the names of the parameters whose weights changed."""
    torch.manual_seed(1)
    names = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, **names)
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora).train().to(dtype or torch.float32)
    model, optimizer, *criteria, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(torch.randint(0, 64, (400, 12)), batch_size=20),
        noise_multiplier=0.787,
        max_grad_norm=0.01,
        grad_sample_mode=mode,
    )
    if fault == "noise":
        optimizer.noise_multiplier = 0.55
    if fault == "clipping":  # a norm that the noise does not follow
        parts = SimpleNamespace(clip=optimizer.clip_and_accumulate)
        optimizer.clip_and_accumulate = lambda: with_norm(optimizer, 0.02, parts.clip)
    before = {name: value.clone() for name, value in model.named_parameters()}
    with observe(optimizer, claim=CLAIM, loader=loader, module=model, seed=1) as recorder:
        for _ in range(STEPS // 20):
            for tokens in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                    logits = model(input_ids=tokens).logits[:, :-1]
                    flat = logits.reshape(-1, 64), tokens[:, 1:].reshape(-1)
                    loss = (
                        criteria[0](*flat, shape=logits.shape)
                        if criteria
                        else nn.functional.cross_entropy(*flat)
                    )
                loss.backward()
                optimizer.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    return recorder, moved, {name for name, value in model.named_parameters() if value.requires_grad}


def with_norm(optimizer: Any, norm: float, clip: Any) -> None:
    stated, optimizer.max_grad_norm = optimizer.max_grad_norm, norm
    clip()
    optimizer.max_grad_norm = stated


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "hooks"},
        {"mode": "functorch"},
        {"mode": "ghost"},
        {"mode": "hooks", "dtype": torch.bfloat16},
        {"mode": "ghost", "dtype": torch.bfloat16},
        {"mode": "hooks", "is_autocast": True},
    ],
    ids=["hooks", "functorch", "ghost", "bfloat16", "ghost in bfloat16", "autocast"],
)
def test_an_audit_of_adapters_is_tight_and_only_they_move(options: dict[str, Any]) -> None:
    recorder, moved, trained = audited(**options)
    result = recorder.audit()
    assert not result.is_violation
    assert result.bound.epsilon > 0.75 * CLAIM.epsilon  # of 60 steps
    assert moved == trained
    assert all("lora" in name for name in trained)


@pytest.mark.parametrize("fault", ["noise", "clipping"])
def test_a_fault_in_the_training_of_adapters_is_found(fault: str) -> None:
    recorder, _, _ = audited(fault)
    assert recorder.audit().is_violation

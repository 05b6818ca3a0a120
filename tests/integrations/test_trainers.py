"""Trainers of Hugging Face and Lightning: the same verdicts as around a loop of one's own."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import dpaudit
from dpaudit.integrations.lightning import AuditCallback
from dpaudit.integrations.transformers import observe_trainer

STEPS = 60
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.787, sample_rate=0.05, num_steps=STEPS, delta=1e-5)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the trainers and of what they import
    pytest.mark.slow,  # transformers, peft and lightning are imported
]


class ClearGradients(TrainerCallback):
    def on_step_end(self, *_: Any, optimizer: Any, **_parts: Any) -> None:
        optimizer.zero_grad()


class FailsInStep(TrainerCallback):
    def on_step_end(self, _args: Any, state: Any, *_: Any, **_parts: Any) -> None:
        if state.global_step == 30:
            raise RuntimeError("the node is gone")


class PrivateTrainer(Trainer):
    loader: Any

    def get_train_dataloader(self) -> Any:
        return self.loader


class LateTrainer(PrivateTrainer):
    """A trainer whose optimizer is created in ``train()``."""

    late: Any

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = self.late
        return self.optimizer


def lora_training(fault: str = "") -> SimpleNamespace:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora).train()
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (400, 8))]
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=0.787,
        max_grad_norm=0.01,
    )
    if fault == "noise":
        optimizer.noise_multiplier = 0.55
    if fault == "clipping":
        optimizer.clip_and_accumulate = lambda: summed_without_clipping(optimizer)
    return SimpleNamespace(model=model, optimizer=optimizer, loader=loader, engine=engine)


def summed_without_clipping(optimizer: Any) -> None:
    for parameter, gradients in zip(optimizer.params, optimizer.grad_samples, strict=True):
        total = gradients.sum(dim=0)
        parameter.summed_grad = total if parameter.summed_grad is None else parameter.summed_grad + total


def trainer_of(
    parts: SimpleNamespace,
    folder: Any,
    *callbacks: Any,
    kind: type[PrivateTrainer] = PrivateTrainer,
    **settings: Any,
) -> PrivateTrainer:
    usual = {"max_steps": STEPS, "report_to": [], "logging_steps": 10, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **(usual | settings))
    optimizers = (None, None) if kind is LateTrainer else (parts.optimizer, None)
    trainer = kind(parts.model, arguments, optimizers=optimizers, callbacks=[ClearGradients, *callbacks])
    trainer.loader = parts.loader
    if kind is LateTrainer:
        trainer.late = parts.optimizer  # type: ignore[attr-defined]
    return trainer


@pytest.mark.parametrize(("fault", "is_violation"), [("", False), ("noise", True), ("clipping", True)])
def test_the_trainer_of_hugging_face_has_the_verdict_of_its_optimizer(
    fault: str, is_violation: bool, tmp_path: Any
) -> None:
    trainer = trainer_of(lora_training(fault), tmp_path)
    with observe_trainer(trainer, claim=CLAIM, seed=1) as training:
        trainer.train()
    result = training.audit()
    assert training.recorder.num_done == STEPS
    assert result.is_violation is is_violation
    assert {"participation-counts", "batch-sizes"} <= {check.name for check in result.diagnosis.checks}


def test_the_live_bound_is_in_the_history_and_in_tensorboard(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = trainer_of(lora_training(), tmp_path, report_to=["tensorboard"])
    with observe_trainer(trainer, claim=CLAIM, seed=1) as training:
        trainer.train()
    logged = [entry["audited_epsilon"] for entry in trainer.state.log_history]
    assert logged == sorted(logged)
    assert logged[-1] == training.recorder.live().epsilon > 1
    (events,) = (tmp_path / "board").rglob("events*")
    board = EventAccumulator(str(events)).Reload()
    assert math.isclose(board.Scalars("train/audited_epsilon")[-1].value, logged[-1], rel_tol=1e-6)


def test_an_exception_in_a_trainer_leaves_the_optimizer_as_before(tmp_path: Any) -> None:
    parts = lora_training()
    before = vars(parts.optimizer).keys()
    trainer = trainer_of(parts, tmp_path, FailsInStep)
    callbacks = list(trainer.callback_handler.callbacks)
    with (
        pytest.raises(RuntimeError, match="node is gone"),
        observe_trainer(trainer, claim=CLAIM, seed=1) as training,
    ):
        trainer.train()
    assert vars(parts.optimizer).keys() == before
    assert "log" not in vars(trainer)
    assert trainer.callback_handler.callbacks == callbacks
    assert training.recorder.num_done == 30
    assert not training.audit().is_violation


def test_a_trainer_stops_at_the_first_violation(tmp_path: Any) -> None:
    trainer = trainer_of(lora_training("noise"), tmp_path)
    with observe_trainer(trainer, claim=CLAIM, seed=1, stop_on_violation=True) as training:
        trainer.train()
    assert 0 < training.recorder.num_done < STEPS
    assert training.audit().is_violation


def test_an_optimizer_that_is_created_by_train_is_observed(tmp_path: Any) -> None:
    trainer = trainer_of(lora_training(), tmp_path, kind=LateTrainer)
    with observe_trainer(trainer, claim=CLAIM, seed=1) as training:
        trainer.train()
    assert training.recorder.num_done == STEPS


def test_physical_batches_of_a_trainer_are_no_steps(tmp_path: Any) -> None:
    parts = lora_training()
    with BatchMemoryManager(
        data_loader=parts.loader, max_physical_batch_size=8, optimizer=parts.optimizer
    ) as loader:
        trainer = trainer_of(
            SimpleNamespace(**{**vars(parts), "loader": loader}), tmp_path, num_train_epochs=2, max_steps=-1
        )
        with observe_trainer(trainer, claim=CLAIM, seed=1) as training:
            trainer.train()
    num_accounted = sum(num_steps for _, _, num_steps in parts.engine.accountant.history)
    assert training.recorder.num_done == num_accounted < trainer.state.global_step
    assert not training.audit().is_violation


def test_a_trainer_without_a_private_optimizer_is_refused_when_it_trains(tmp_path: Any) -> None:
    parts = lora_training()
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    trainer = trainer_of(parts, tmp_path)
    with pytest.raises(dpaudit.InputError, match="is not private"), observe_trainer(trainer, claim=CLAIM):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"claim": 3}, dpaudit.InputError, "claim must be a Claim"),
        ({"claim": CLAIM, "delta": 1e-5}, dpaudit.InputError, "not both"),
        ({"clame": CLAIM}, TypeError, "clame"),
    ],
)
def test_a_wrong_option_is_refused_before_training(
    options: Any, error: Any, sentence: str, tmp_path: Any
) -> None:
    with pytest.raises(error, match=sentence):
        AuditCallback(**options)
    trainer = trainer_of(lora_training(), tmp_path)
    with pytest.raises(error, match=sentence), observe_trainer(trainer, **options):
        pass


def test_a_verdict_before_training_is_refused() -> None:
    with pytest.raises(dpaudit.InputError, match="no step; train first"):
        AuditCallback(claim=CLAIM).audit()


def digits_training(*, is_broken: bool) -> SimpleNamespace:
    torch.manual_seed(1)
    inputs = torch.randn(400, 8)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=0.787,
        max_grad_norm=1.0,
    )
    if is_broken:
        optimizer.noise_multiplier = 0.55
    return SimpleNamespace(model=model, optimizer=optimizer, loader=loader)


def fit(package: str, parts: SimpleNamespace, audit: Any, fails_in: int = -1) -> Any:
    lightning = importlib.import_module(package)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def configure_optimizers(self) -> Any:
            return parts.optimizer

        def training_step(self, batch: Any, _: int) -> Any:
            if self.global_step == fails_in:
                raise RuntimeError("the node is gone")
            inputs, targets = batch
            return nn.functional.cross_entropy(self.model(inputs), targets)

    trainer = lightning.Trainer(
        max_steps=STEPS, callbacks=[audit], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), parts.loader)
    return trainer


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callback_of_lightning_has_the_verdict_of_its_optimizer(package: str, is_broken: bool) -> None:
    importlib.import_module(package)
    parts = digits_training(is_broken=is_broken)
    before = vars(parts.optimizer).keys()
    audit = AuditCallback(claim=CLAIM, loader=parts.loader, seed=1)
    trainer = fit(package, parts, audit)
    result = audit.audit()
    assert result.is_violation is is_broken
    assert {"participation-counts", "batch-sizes"} <= {check.name for check in result.diagnosis.checks}
    assert math.isclose(
        trainer.logged_metrics["audited_epsilon"], audit.training.latest.epsilon, rel_tol=1e-6
    )  # type: ignore[union-attr]
    assert vars(parts.optimizer).keys() == before


def test_an_exception_in_lightning_leaves_the_optimizer_as_before() -> None:
    parts = digits_training(is_broken=False)
    before = vars(parts.optimizer).keys()
    audit = AuditCallback(claim=CLAIM, loader=parts.loader, seed=1)
    with pytest.raises(RuntimeError, match="node is gone"):
        fit("lightning.pytorch", parts, audit, fails_in=20)
    assert vars(parts.optimizer).keys() == before
    assert audit.training.recorder.num_done == 20


def test_lightning_stops_at_the_first_violation() -> None:
    parts = digits_training(is_broken=True)
    audit = AuditCallback(claim=CLAIM, loader=parts.loader, seed=1, stop_on_violation=True)
    fit("lightning.pytorch", parts, audit)
    assert 0 < audit.training.recorder.num_done < STEPS

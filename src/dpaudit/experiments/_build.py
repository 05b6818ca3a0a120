"""From a config to a training with its audit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpaudit.errors import InputError
from dpaudit.experiments._audits import Audit, Watchers, audit_for
from dpaudit.experiments._held_out import split_held_out
from dpaudit.experiments._models import model_for
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.config import (
    Config,
    FewSeedsConfig,
    NoiseTooSmallConfig,
    OptimizerConfig,
    SgdConfig,
    ShuffledBatchesConfig,
    TrainingConfig,
)
from dpaudit.training import (
    DPSGD,
    SGD,
    Adam,
    Diagnose,
    FlipAndCrop,
    Mechanism,
    Optimizer,
    Sampling,
    Training,
    initialize,
)
from dpaudit.training.data import Dataset
from dpaudit.training.faults import ClippedAfterMean, FewSeeds, NoiseTooSmall, ShuffledBatches, Unclipped

__all__ = ["Experiment", "build", "device_of", "mechanism_of", "settings_of"]


@dataclass(frozen=True, eq=False)
class Experiment:
    """A training, its audit, the tests of its noise and batches, and the examples to test the model on."""

    config: Config
    resolved: Resolved
    training: Training
    audit: Audit
    tests: Diagnose
    test: Dataset


def build(
    config: Config,
    resolved: Resolved,
    data: tuple[Dataset, Dataset],
    watchers: Watchers | None = None,
) -> Experiment:
    """Everything in place, nothing trained yet. ``watchers`` hear what the audit does."""
    train, (test, held_out) = data[0], split_held_out(config, resolved, *data)
    seeds = resolved.training_seeds
    audit, tests = audit_for(config, resolved, held_out, watchers or Watchers()), Diagnose()
    training = Training(
        initialize(model_for(config.model, train), seeds.initialization),
        train,
        settings_of(config.training, resolved),
        seeds=seeds,
        device=device_of(config.device),
        hooks=[audit, tests],
        sampling=_sampling(config.training, resolved),
        mechanism=mechanism_of(config.training, resolved),
    )
    return Experiment(config, resolved, training, audit, tests, test)


def settings_of(training: TrainingConfig, resolved: Resolved) -> DPSGD:
    return DPSGD(
        noise_multiplier=resolved.noise_multiplier,
        max_grad_norm=training.max_grad_norm,
        sample_rate=resolved.sample_rate,
        num_steps=training.num_steps,
        optimizer=_optimizer(training.optimizer),
        multiplicity=training.multiplicity or 1,
        augmentation=None if training.multiplicity is None else FlipAndCrop(),
    )


def _optimizer(config: OptimizerConfig) -> Optimizer:
    if isinstance(config, SgdConfig):
        return SGD(
            learning_rate=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
    return Adam(learning_rate=config.learning_rate, weight_decay=config.weight_decay)


def _sampling(training: TrainingConfig, resolved: Resolved) -> Sampling | None:
    """A broken one, if the config asks for it."""
    return (
        ShuffledBatches(resolved.sample_rate) if isinstance(training.fault, ShuffledBatchesConfig) else None
    )


def mechanism_of(training: TrainingConfig, resolved: Resolved) -> Mechanism | None:
    """A broken one, if the config asks for it."""
    fault = training.fault
    if fault is None or isinstance(fault, ShuffledBatchesConfig):
        return None
    usual = {"noise_multiplier": resolved.noise_multiplier, "max_grad_norm": training.max_grad_norm}
    if isinstance(fault, NoiseTooSmallConfig):
        return NoiseTooSmall(**usual, factor=fault.factor)
    if isinstance(fault, FewSeedsConfig):
        return FewSeeds(**usual, num_seeds=fault.num_seeds)
    return Unclipped(**usual) if fault.name == "unclipped" else ClippedAfterMean(**usual)


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"Expected a device that torch can use here, got device={name!r}.") from error
    return device

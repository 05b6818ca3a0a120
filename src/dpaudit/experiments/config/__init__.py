"""Configs of experiments: TOML files, checked as a whole before anything runs."""

from dpaudit.experiments.config._audits import AuditConfig, EndToEndConfig, OneRunConfig, PaperConfig
from dpaudit.experiments.config._canaries import (
    AdversarialConfig,
    AnyCanary,
    CanaryConfig,
    CraftedConfig,
    ExampleConfig,
)
from dpaudit.experiments.config._config import Config
from dpaudit.experiments.config._data import DataConfig, Digits, Files, Random
from dpaudit.experiments.config._load import load_config, parse_config
from dpaudit.experiments.config._models import Mlp, ModelConfig, NamedModel
from dpaudit.experiments.config._training import (
    AdamConfig,
    FaultConfig,
    NoiseTooSmallConfig,
    OptimizerConfig,
    SgdConfig,
    ShuffledBatchesConfig,
    TrainingConfig,
)

__all__ = [
    "AdamConfig",
    "AdversarialConfig",
    "AnyCanary",
    "AuditConfig",
    "CanaryConfig",
    "Config",
    "CraftedConfig",
    "DataConfig",
    "Digits",
    "EndToEndConfig",
    "ExampleConfig",
    "FaultConfig",
    "Files",
    "Mlp",
    "ModelConfig",
    "NamedModel",
    "NoiseTooSmallConfig",
    "OneRunConfig",
    "OptimizerConfig",
    "PaperConfig",
    "Random",
    "SgdConfig",
    "ShuffledBatchesConfig",
    "TrainingConfig",
    "load_config",
    "parse_config",
]

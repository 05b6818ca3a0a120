"""Configs of experiments: TOML files, checked as a whole before anything runs."""

from dpaudit.experiments.config._audits import (
    AuditConfig,
    EndToEndConfig,
    ManyRunsConfig,
    OneRunConfig,
    PaperConfig,
)
from dpaudit.experiments.config._canaries import (
    AdversarialConfig,
    AnyCanary,
    CanaryConfig,
    ClipBkdConfig,
    CraftedConfig,
    ExampleConfig,
    GivenConfig,
)
from dpaudit.experiments.config._config import Config
from dpaudit.experiments.config._data import DataConfig, Digits, Files, Random
from dpaudit.experiments.config._load import load_config, parse_config
from dpaudit.experiments.config._models import FunctionModel, Mlp, ModelConfig, NamedModel
from dpaudit.experiments.config._pool import PoolConfig, ProcessesConfig, RayConfig, SerialConfig
from dpaudit.experiments.config._starts import PretrainedConfig, RandomConfig
from dpaudit.experiments.config._training import (
    AdamConfig,
    FaultConfig,
    FewSeedsConfig,
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
    "ClipBkdConfig",
    "Config",
    "CraftedConfig",
    "DataConfig",
    "Digits",
    "EndToEndConfig",
    "ExampleConfig",
    "FaultConfig",
    "FewSeedsConfig",
    "Files",
    "FunctionModel",
    "GivenConfig",
    "ManyRunsConfig",
    "Mlp",
    "ModelConfig",
    "NamedModel",
    "NoiseTooSmallConfig",
    "OneRunConfig",
    "OptimizerConfig",
    "PaperConfig",
    "PoolConfig",
    "PretrainedConfig",
    "ProcessesConfig",
    "Random",
    "RandomConfig",
    "RayConfig",
    "SerialConfig",
    "SgdConfig",
    "ShuffledBatchesConfig",
    "TrainingConfig",
    "load_config",
    "parse_config",
]

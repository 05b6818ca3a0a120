"""Tables that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments.config._audits import ManyRunsConfig
from dpaudit.experiments.config._canaries import ClipBkdConfig, ExampleConfig, GivenConfig
from dpaudit.experiments.config._models import FunctionModel
from dpaudit.experiments.config._starts import PretrainedConfig
from dpaudit.experiments.config._training import ShuffledBatchesConfig

if TYPE_CHECKING:
    from dpaudit.experiments.config._config import Config

__all__ = ["require_consistent"]


def require_consistent(config: Config) -> None:
    """Refuse what single tables cannot know of each other."""
    if isinstance(config.model, FunctionModel):
        _require_for_function(config)
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        _require_for_black_box(config)
    if config.pool is not None and not isinstance(config.audit, ManyRunsConfig):
        raise InputError(f"Expected no pool with mode = {config.audit.mode!r}, which trains one model.")


def _require_for_function(config: Config) -> None:
    if not isinstance(config.audit, ManyRunsConfig):
        raise InputError("Expected threat_model = 'black-box' and mode = 'many-runs' with a function.")
    if isinstance(config.audit.initialization, PretrainedConfig):
        raise InputError("Expected no initialization with a function: it makes its own models.")
    if isinstance(config.audit.canary, ClipBkdConfig):
        raise InputError("Expected another canary than 'clip-bkd' with a function: it needs the model.")
    if config.training.fault is not None:
        raise InputError("Expected no training.fault with a function, which is as it is.")


def _require_for_black_box(config: Config) -> None:
    if isinstance(config.training.fault, ShuffledBatchesConfig):
        raise InputError("Expected another fault than 'shuffled-batches' with threat_model = 'black-box'.")
    canary = config.audit.canary
    if isinstance(config.audit, ManyRunsConfig):
        _require_one_example(canary)
        return
    many = isinstance(canary, ExampleConfig) and canary.kind == "mislabelled"
    many = many or (isinstance(canary, GivenConfig) and canary.index is None and canary.file is None)
    if not many:
        raise InputError(
            "Expected the canary kind 'mislabelled', or 'example' without an index, for many different "
            "canaries in one run."
        )
    if config.training.noise_multiplier == 0:
        raise InputError("Expected mode = 'many-runs' with noise_multiplier=0.")


def _require_one_example(canary: object) -> None:
    if not isinstance(canary, GivenConfig):
        return
    if (canary.index is None) == (canary.file is None):
        raise InputError("Expected exactly one of index and file for the canary kind 'example'.")
    if canary.file is not None and canary.target is None:
        raise InputError("Expected a target, its class, for the canary in a file.")

"""A whole experiment as a value."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments.config._audits import AuditConfig, OneRunConfig
from dpaudit.experiments.config._data import DataConfig
from dpaudit.experiments.config._fields import NotNegative, Section, Seed
from dpaudit.experiments.config._models import ModelConfig
from dpaudit.experiments.config._training import TrainingConfig

__all__ = ["Config"]


def _available(name: str) -> str:
    known = [model.value for model in ThreatModel]
    if name not in known:
        raise InputError(f"Expected threat_model to be {', '.join(map(repr, known))}, got {name!r}.")
    if name != ThreatModel.GRADIENT.value:
        raise InputError(f"The threat model {name!r} is not there yet; expected 'gradient'.")
    return name


class Config(Section):
    """What ``dpaudit run`` does.

    Without a ``seed``, chance is taken from the operating system. ``output`` is the run's directory.
    """

    output: str
    seed: Seed | None = None
    threat_model: Annotated[str, AfterValidator(_available)] = ThreatModel.GRADIENT.value
    device: str = "cpu"
    checkpoint_seconds: NotNegative = 30.0
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    audit: AuditConfig = OneRunConfig()

    def identity(self) -> dict[str, Any]:
        """All that makes two runs the same run: not where it is kept, nor how often."""
        return self.model_dump(mode="json", exclude={"output", "checkpoint_seconds"})

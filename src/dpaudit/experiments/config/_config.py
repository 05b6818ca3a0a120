"""A whole experiment as a value."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from dpaudit.canaries import ThreatModel
from dpaudit.experiments.config._audits import AuditConfig, OneRunConfig
from dpaudit.experiments.config._data import DataConfig
from dpaudit.experiments.config._fields import NotNegative, Section, Seed
from dpaudit.experiments.config._models import ModelConfig
from dpaudit.experiments.config._threat_models import available, fitting
from dpaudit.experiments.config._training import TrainingConfig

__all__ = ["Config"]


class Config(Section):
    """What ``dpaudit run`` does.

    Without a ``seed``, chance is taken from the operating system. ``output`` is the run's directory.
    """

    output: str
    seed: Seed | None = None
    threat_model: Annotated[str, AfterValidator(available)] = ThreatModel.GRADIENT.value
    device: str = "cpu"
    checkpoint_seconds: NotNegative = 30.0
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    audit: Annotated[AuditConfig, AfterValidator(fitting)] = Field(OneRunConfig(), validate_default=True)

    def identity(self) -> dict[str, Any]:
        """All that makes two runs the same run: not where it is kept, nor how often."""
        return self.model_dump(mode="json", exclude={"output", "checkpoint_seconds"})

"""A whole experiment as a value."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dpaudit.canaries import ThreatModel
from dpaudit.experiments.config._audits import AuditConfig, OneRunConfig
from dpaudit.experiments.config._data import DataConfig
from dpaudit.experiments.config._fields import NotNegative, PathText, Section, Seed
from dpaudit.experiments.config._models import ModelConfig
from dpaudit.experiments.config._pool import PoolConfig
from dpaudit.experiments.config._threat_models import available, fitting, noisy, with_mode
from dpaudit.experiments.config._training import TrainingConfig
from dpaudit.experiments.config._whole import require_consistent

__all__ = ["Config"]


class Config(Section):
    """What ``dpaudit run`` does.

    Without a ``seed``, chance is taken from the operating system. ``output`` is the run's directory.
    """

    output: PathText
    seed: Seed | None = None
    threat_model: Annotated[str, AfterValidator(available)] = ThreatModel.GRADIENT.value
    device: str = "cpu"
    checkpoint_seconds: NotNegative = 30.0
    model: ModelConfig
    data: DataConfig
    training: Annotated[TrainingConfig, AfterValidator(noisy)]
    audit: Annotated[AuditConfig, AfterValidator(fitting), BeforeValidator(with_mode)] = Field(
        OneRunConfig(), validate_default=True
    )
    pool: PoolConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_consistent(self)
        return self

    def identity(self) -> dict[str, Any]:
        """All that makes two runs the same run: not where it is kept, nor how often, nor who trains."""
        return self.model_dump(mode="json", exclude={"output", "checkpoint_seconds", "pool"})

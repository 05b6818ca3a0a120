"""Where the trained models of a black-box audit begin, and how they are asked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from dpaudit.experiments.config._fields import Positive, Section, Whole

__all__ = ["Initialization", "PretrainedConfig", "RandomConfig", "ScoreName"]

ScoreName: TypeAlias = Literal["log-odds", "loss"]


class RandomConfig(Section):
    """Every model has random first weights of its own."""

    kind: Literal["random"] = "random"


class PretrainedConfig(Section):
    """All models start from the same weights, trained on the held-out examples without privacy."""

    kind: Literal["pre-trained"]
    num_steps: Whole = 1_000
    batch_size: Whole = 64
    learning_rate: Positive = 0.1


def _as_table(raw: Any) -> Any:
    """Its kind alone is enough."""
    return {"kind": raw} if isinstance(raw, str) else raw


Initialization: TypeAlias = Annotated[
    Annotated[RandomConfig | PretrainedConfig, Field(discriminator="kind")] | None,
    BeforeValidator(_as_table),
]

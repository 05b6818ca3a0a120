"""Where many trainings run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from dpaudit.experiments.config._fields import NotNegative, Section, Seed, Whole

__all__ = ["PoolConfig", "ProcessesConfig", "RayConfig", "SerialConfig"]


class SerialConfig(Section):
    """One after another, in this process."""

    kind: Literal["serial"]


class ProcessesConfig(Section):
    """Processes of this machine; without ``num_workers``, one for each core."""

    kind: Literal["processes"] = "processes"
    num_workers: Whole | None = None
    max_retries: Seed = 3


class RayConfig(Section):
    """Ray, on this machine or in the cluster at ``address``; the numbers are those of one group of models."""

    kind: Literal["ray"]
    address: str | None = None
    num_cpus: NotNegative = 1.0
    num_gpus: NotNegative = 0.0
    max_retries: Seed = 3


def _with_kind(raw: Any) -> Any:
    """The kind alone is enough, and so is a table without one: of processes."""
    if isinstance(raw, str):
        return {"kind": raw}
    return {"kind": "processes", **raw} if isinstance(raw, dict) else raw


PoolConfig: TypeAlias = Annotated[
    Annotated[SerialConfig | ProcessesConfig | RayConfig, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]

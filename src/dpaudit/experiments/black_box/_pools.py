"""The pool that a config names."""

from __future__ import annotations

from dpaudit.experiments.config import PoolConfig, ProcessesConfig, RayConfig
from dpaudit.experiments.trials import Pool, Processes, Ray, Serial

__all__ = ["pool_for"]


def pool_for(config: PoolConfig | None) -> Pool:
    """The keys of its table are the fields of the pool; without one, processes."""
    if config is None:
        return Processes()
    values = config.model_dump(exclude={"kind"})
    if isinstance(config, ProcessesConfig):
        return Processes(**values)
    return Ray(**values) if isinstance(config, RayConfig) else Serial()

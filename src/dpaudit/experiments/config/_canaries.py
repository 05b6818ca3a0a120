"""What is inserted: gradients, or examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from dpaudit.experiments.config._fields import Positive, Section, Whole

__all__ = ["AdversarialConfig", "AnyCanary", "CanaryConfig", "CraftedConfig", "ExampleConfig"]


class CanaryConfig(Section):
    """The gradients that are inserted, ``scale`` times the clipping norm."""

    kind: Literal["dirac", "constant", "mixed", "random-direction"] = "dirac"
    scale: Positive = 10.0
    moving: bool = False


class ExampleConfig(Section):
    """Examples that need no search."""

    kind: Literal["blank", "mislabelled"]


class AdversarialConfig(Section):
    """Examples moved to where their loss is large."""

    kind: Literal["adversarial"]
    num_steps: Whole = 20
    step_size: Positive = 0.01
    radius: Positive = 0.03


class CraftedConfig(Section):
    """Examples moved to where their gradients are orthogonal to those of others."""

    kind: Literal["crafted"] = "crafted"
    num_steps: Whole = 50
    step_size: Positive = 0.1
    every: Whole | None = None
    long: bool = False


def _with_kind(raw: Any) -> Any:
    """A table without a kind is of gradients."""
    return {"kind": "dirac", **raw} if isinstance(raw, Mapping) else raw


AnyCanary: TypeAlias = Annotated[
    Annotated[CanaryConfig | ExampleConfig | AdversarialConfig | CraftedConfig, Field(discriminator="kind")]
    | None,
    BeforeValidator(_with_kind),
]

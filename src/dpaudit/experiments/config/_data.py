"""Which data are trained on."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from dpaudit.experiments.config._fields import Section, Seed, Sizes, Whole

__all__ = ["DataConfig", "Digits", "Files", "Random"]


class Digits(Section):
    """The digits that come with dpaudit."""

    name: Literal["digits"]
    num_examples: Whole | None = None


class Files(Section):
    """Data from official files in a directory."""

    name: Literal["cifar10", "purchase100", "location", "idx"]
    directory: str
    num_examples: Whole | None = None


class Random(Section):
    """Random pixels and classes."""

    name: Literal["random"]
    num_examples: Whole = 50_000
    shape: Sizes = (3, 32, 32)
    num_classes: Whole = 10
    seed: Seed = 0


DataConfig: TypeAlias = Annotated[Digits | Files | Random, Field(discriminator="name")]

"""Which data are trained on."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from dpaudit.experiments.config._fields import Section, Seed, Sizes, Whole

__all__ = ["DataConfig", "Digits", "Files", "Random"]


class _Sized(Section):
    """How many examples are trained on, and how many of the others are for test; None: all there are."""

    num_examples: Whole | None = None
    num_test: Whole | None = None


class Digits(_Sized):
    """The digits that come with dpaudit."""

    name: Literal["digits"]


class Files(_Sized):
    """Data from official files in a directory."""

    name: Literal["cifar10", "purchase100", "location", "idx"]
    directory: str


class Random(Section):
    """Random pixels and classes; without ``num_test`` a fifth as many more are for test."""

    name: Literal["random"]
    num_examples: Whole = 50_000
    num_test: Whole | None = None
    shape: Sizes = (3, 32, 32)
    num_classes: Whole = 10
    seed: Seed = 0


DataConfig: TypeAlias = Annotated[Digits | Files | Random, Field(discriminator="name")]

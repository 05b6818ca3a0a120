"""Which model is trained."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from dpaudit.experiments.config._fields import Section, Sizes

__all__ = ["FunctionModel", "Mlp", "ModelConfig", "NamedModel"]


class NamedModel(Section):
    """A model that its name says all of; inputs and classes are those of the data."""

    name: Literal["wide-resnet-16-4", "wide-resnet-40-4", "conv-net", "purchase-mlp", "logistic-regression"]


class Mlp(Section):
    """Linear layers with ReLU between them."""

    name: Literal["mlp"]
    hidden: Sizes = (128,)


class FunctionModel(Section):
    """A training function of your own, named as ``module:function``."""

    name: Literal["function"]
    function: str


ModelConfig: TypeAlias = Annotated[NamedModel | Mlp | FunctionModel, Field(discriminator="name")]

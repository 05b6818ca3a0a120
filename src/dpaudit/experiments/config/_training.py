"""How it is trained: the numbers of DP-SGD, the optimizer, and a fault if one is to be put in."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from dpaudit.experiments.config._fields import (
    Delta,
    NotNegative,
    Positive,
    Rate,
    Section,
    Steps,
    Whole,
    exactly_one,
)

__all__ = [
    "AdamConfig",
    "FaultConfig",
    "FewSeedsConfig",
    "NoiseTooSmallConfig",
    "OptimizerConfig",
    "SgdConfig",
    "ShuffledBatchesConfig",
    "TrainingConfig",
]


class SgdConfig(Section):
    """Gradient descent."""

    name: Literal["sgd"]
    learning_rate: Positive = 1.0
    momentum: NotNegative = 0.0
    weight_decay: NotNegative = 0.0


class AdamConfig(Section):
    """Adam."""

    name: Literal["adam"]
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 0.0


OptimizerConfig: TypeAlias = Annotated[SgdConfig | AdamConfig, Field(discriminator="name")]


class NoiseTooSmallConfig(Section):
    """Noise of ``factor`` times what it should be."""

    name: Literal["noise-too-small"]
    factor: NotNegative = 0.8


class ClippingFault(Section):
    """Gradients that are not clipped, or clipped after they were averaged."""

    name: Literal["unclipped", "clipped-after-mean"]


class FewSeedsConfig(Section):
    """Noise of a generator that is seeded in every step, with one of ``num_seeds``."""

    name: Literal["few-seeds"]
    num_seeds: Whole = 100


class ShuffledBatchesConfig(Section):
    """Epochs that are shuffled and cut, accounted for as Poisson sampling."""

    name: Literal["shuffled-batches"]


FaultConfig: TypeAlias = Annotated[
    NoiseTooSmallConfig | ClippingFault | FewSeedsConfig | ShuffledBatchesConfig, Field(discriminator="name")
]


class TrainingConfig(Section):
    """DP-SGD. The claim is made of these numbers.

    Without noise nothing is claimed: only black-box audits take a noise multiplier of zero. With
    ``multiplicity`` the gradients of so many mirrored and shifted copies of an image are averaged before
    they are clipped.
    """

    noise_multiplier: NotNegative | None = None
    target_epsilon: Annotated[Positive | None, exactly_one("noise_multiplier")] = Field(
        None, validate_default=True
    )
    delta: Delta = 1e-5
    sample_rate: Rate | None = None
    batch_size: Annotated[Positive | None, exactly_one("sample_rate")] = Field(None, validate_default=True)
    num_steps: Steps
    max_grad_norm: Positive = 1.0
    multiplicity: Whole | None = None
    optimizer: OptimizerConfig = SgdConfig(name="sgd")
    fault: FaultConfig | None = None

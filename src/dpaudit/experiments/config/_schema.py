"""The tables of a config: model, data, training, audit with its canary, and the pool of many trainings.

Each is a section with its keys and their defaults; how they go together is in ``_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from dpaudit.errors import InputError
from dpaudit.experiments.config._fields import (
    Confidence,
    Count,
    Delta,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Rate,
    Section,
    Sizes,
    Steps,
    exactly_one,
)
from dpaudit.methods import NAMES


class NamedModel(Section):
    """A model without settings; inputs and classes are those of the data."""

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


class _SizedDataConfig(Section):
    """How many examples are trained on, and how many of the others are for test; None: all there are."""

    num_examples: PositiveInt | None = None
    num_test: PositiveInt | None = None


class Digits(_SizedDataConfig):
    """The digits that come with dpaudit."""

    name: Literal["digits"]


class Files(_SizedDataConfig):
    """Data from official files in a directory."""

    name: Literal["cifar10", "purchase100", "location", "idx"]
    directory: str


class Random(Section):
    """Random pixels and classes; without ``num_test`` a fifth as many more are for test."""

    name: Literal["random"]
    num_examples: PositiveInt = 50_000
    num_test: PositiveInt | None = None
    shape: Sizes = (3, 32, 32)
    num_classes: PositiveInt = 10
    seed: NonNegativeInt = 0


DataConfig: TypeAlias = Annotated[Digits | Files | Random, Field(discriminator="name")]


class SgdConfig(Section):
    """Gradient descent."""

    name: Literal["sgd"]
    learning_rate: Positive = 1.0
    momentum: NonNegative = 0.0
    weight_decay: NonNegative = 0.0


class AdamConfig(Section):
    """Adam."""

    name: Literal["adam"]
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 0.0


OptimizerConfig: TypeAlias = Annotated[SgdConfig | AdamConfig, Field(discriminator="name")]


class NoiseTooSmallConfig(Section):
    """Noise of ``factor`` times what it should be."""

    name: Literal["noise-too-small"]
    factor: NonNegative = 0.8


class ClippingFault(Section):
    """Gradients that are not clipped, or clipped after they were averaged."""

    name: Literal["unclipped", "clipped-after-mean"]


class FewSeedsConfig(Section):
    """Noise of a generator that is seeded in every step, with one of ``num_seeds``."""

    name: Literal["few-seeds"]
    num_seeds: PositiveInt = 100


class ShuffledBatchesConfig(Section):
    """Epochs that are shuffled and cut, accounted for as Poisson sampling."""

    name: Literal["shuffled-batches"]


FaultConfig: TypeAlias = Annotated[
    NoiseTooSmallConfig | ClippingFault | FewSeedsConfig | ShuffledBatchesConfig, Field(discriminator="name")
]


class TrainingConfig(Section):
    """DP-SGD, with the numbers that the claim follows from.

    Without noise nothing is claimed: only black-box audits take a noise multiplier of zero. With
    ``multiplicity``, the gradients of that many mirrored and shifted copies of an image are averaged before
    they are clipped.
    """

    noise_multiplier: NonNegative | None = None
    target_epsilon: Annotated[Positive | None, exactly_one("noise_multiplier")] = Field(
        None, validate_default=True
    )
    delta: Delta = 1e-5
    sample_rate: Rate | None = None
    batch_size: Annotated[Positive | None, exactly_one("sample_rate")] = Field(None, validate_default=True)
    num_steps: Steps
    max_grad_norm: Positive = 1.0
    multiplicity: PositiveInt | None = None
    optimizer: OptimizerConfig = SgdConfig(name="sgd")
    fault: FaultConfig | None = None


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
    num_steps: PositiveInt = 20
    step_size: Positive = 0.01
    radius: Positive = 0.03


class CraftedConfig(Section):
    """Examples moved to where their gradients are orthogonal to those of others."""

    kind: Literal["crafted"] = "crafted"
    num_steps: PositiveInt = 50
    step_size: Positive = 0.1
    every: PositiveInt | None = None
    long: bool = False


class ClipBkdConfig(Section):
    """An example where the data vary least, with an unlikely class."""

    kind: Literal["clip-bkd"]


class GivenConfig(Section):
    """A given example: that of an ``index`` among the held-out ones, or a ``file`` of numpy.

    Without ``target`` a held-out example has its own class.
    """

    kind: Literal["example"]
    index: NonNegativeInt | None = None
    file: str | None = None
    target: NonNegativeInt | None = None


def _gradient_by_default(raw: Any) -> Any:
    """Take a table without a kind for one of gradients."""
    return {"kind": "dirac", **raw} if isinstance(raw, Mapping) else raw


AnyCanary: TypeAlias = Annotated[
    Annotated[
        CanaryConfig | ExampleConfig | AdversarialConfig | CraftedConfig | ClipBkdConfig | GivenConfig,
        Field(discriminator="kind"),
    ]
    | None,
    BeforeValidator(_gradient_by_default),
]


ScoreName: TypeAlias = Literal["log-odds", "loss"]


class RandomWeightsConfig(Section):
    """Every model has random first weights of its own."""

    kind: Literal["random"] = "random"


class PretrainedConfig(Section):
    """All models start from the same weights, trained on the held-out examples without privacy."""

    kind: Literal["pre-trained"]
    num_steps: PositiveInt = 1_000
    batch_size: PositiveInt = 64
    learning_rate: Positive = 0.1


def _as_table(raw: Any) -> Any:
    """Take a kind alone for a table."""
    return {"kind": raw} if isinstance(raw, str) else raw


Initialization: TypeAlias = Annotated[
    Annotated[RandomWeightsConfig | PretrainedConfig, Field(discriminator="kind")] | None,
    BeforeValidator(_as_table),
]


def _known(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for name in names or ():
        if name not in NAMES:
            raise InputError(f"Expected methods of {', '.join(map(repr, NAMES))}, got {name!r}.")
    return names


Methods: TypeAlias = Annotated[tuple[str, ...] | None, Field(strict=False), AfterValidator(_known)]


class _AuditConfig(Section):
    """The keys of all modes. Without ``methods``, bounds of all of them are reported.

    Without ``canary``, it is the usual one of the threat model.
    """

    confidence: Confidence = 0.95
    methods: Methods = None
    canary: AnyCanary = None


class _StepAuditConfig(_AuditConfig):
    """The keys of modes that observe single steps.

    ``held_out`` is the number of examples that input canaries are made from.
    """

    first_steps: PositiveInt | None = None
    held_out: PositiveInt | None = None
    stop_on_violation: bool = False


class OneRunConfig(_StepAuditConfig):
    """Many canaries in one training.

    Only for audits of the final model: ``score``, ``num_guesses`` and ``initialization``.
    """

    mode: Literal["one-run"] = "one-run"
    num_canaries: PositiveInt | None = None
    num_guesses: PositiveInt | None = None
    score: ScoreName | None = None
    initialization: Initialization = None


class PaperConfig(_StepAuditConfig):
    """The paper's two batches a step, with one canary."""

    mode: Literal["paper"]
    num_canaries: Literal[1] = 1
    canary_rate: Rate = 1.0
    residual: bool = False


class EndToEndConfig(_AuditConfig):
    """One observation of the whole training from each canary."""

    mode: Literal["end-to-end"]
    num_canaries: PositiveInt | None = None


class ManyRunsConfig(_AuditConfig):
    """One observation from each of many trainings; the canary is in every second one's data.

    Without ``threshold`` the rule is chosen by the number of scores.
    """

    mode: Literal["many-runs"] = "many-runs"
    num_models: Count = 2_000
    score: ScoreName | None = None
    threshold: Literal["simultaneous", "held-out"] | None = None
    held_out: PositiveInt | None = None
    initialization: Initialization = None


def _mode(raw: Any) -> Any:
    return raw.get("mode", "one-run") if isinstance(raw, dict) else getattr(raw, "mode", "one-run")


AuditConfig: TypeAlias = Annotated[
    Annotated[OneRunConfig, Tag("one-run")]
    | Annotated[PaperConfig, Tag("paper")]
    | Annotated[EndToEndConfig, Tag("end-to-end")]
    | Annotated[ManyRunsConfig, Tag("many-runs")],
    Discriminator(_mode),
]


class SerialConfig(Section):
    """One after another, in this process."""

    kind: Literal["serial"]


class ProcessesConfig(Section):
    """Processes of this machine; without ``num_workers``, one for each core."""

    kind: Literal["processes"] = "processes"
    num_workers: PositiveInt | None = None
    max_retries: NonNegativeInt = 3


class RayConfig(Section):
    """Ray, on this machine or in the cluster at ``address``; the numbers are those of one group of models."""

    kind: Literal["ray"]
    address: str | None = None
    num_cpus: NonNegative = 1.0
    num_gpus: NonNegative = 0.0
    max_retries: NonNegativeInt = 3


def _processes_by_default(raw: Any) -> Any:
    """Take a kind alone for a table, and a table without a kind for one of processes."""
    raw = _as_table(raw)
    return {"kind": "processes", **raw} if isinstance(raw, dict) else raw


PoolConfig: TypeAlias = Annotated[
    Annotated[SerialConfig | ProcessesConfig | RayConfig, Field(discriminator="kind")],
    BeforeValidator(_processes_by_default),
]

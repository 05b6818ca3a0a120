"""The tables of a config: model, data, training, audit with its canary, and the pool of many training runs.

Each is a section with its keys and their defaults, validated by the same functions as dpaudit's arguments;
constraints between sections are in ``_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
)

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.methods import NAMES


class Section(BaseModel):
    """Immutable table of a config; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _named(check: Callable[..., Any], **more: Any) -> AfterValidator:
    """Return a validator of a single value that names the key in its error."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        return check(info.field_name, value, **more)

    return AfterValidator(checked)


def _each_positive(value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
    return tuple(_validate.integer(str(info.field_name), size) for size in value)


def _path(value: str) -> str:
    """Raise on an empty path, which would mean the current directory."""
    if not value.strip():
        raise InputError("The path is empty; use '.' for the current directory.")
    return value


def _in_range(name: str, value: float, largest: float = 1e30) -> float:
    """Raise on a rate whose updates, which are computed in single precision, could overflow."""
    if value > largest:
        raise InputError(f"{name} must be at most {largest:g}, got {value:g}.")
    return value


Positive: TypeAlias = Annotated[float, _named(_validate.positive)]
NonNegative: TypeAlias = Annotated[float, _named(_validate.at_least, low=0.0)]
LearningRate: TypeAlias = Annotated[Positive, _named(_in_range)]
Decay: TypeAlias = Annotated[NonNegative, _named(_in_range)]
Multiplicity: TypeAlias = Annotated[int, _named(_validate.integer, high=1000)]
PositiveInt: TypeAlias = Annotated[int, _named(_validate.integer)]
Steps: TypeAlias = Annotated[int, AfterValidator(_validate.num_steps)]
Count: TypeAlias = Annotated[int, _named(_validate.integer, low=2, high=1_000_000)]
NonNegativeInt: TypeAlias = Annotated[int, _named(_validate.integer, low=0)]
Delta: TypeAlias = Annotated[float, _named(_validate.fraction)]
Confidence: TypeAlias = Annotated[float, AfterValidator(_validate.confidence)]
Rate: TypeAlias = Annotated[float, AfterValidator(_validate.sample_rate)]
PathText: TypeAlias = Annotated[str, AfterValidator(_path)]
Sizes: TypeAlias = Annotated[tuple[int, ...], Field(strict=False), AfterValidator(_each_positive)]


def exactly_one(other: str) -> AfterValidator:
    """Return a validator that requires exactly one of this key and ``other``, a key before it."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        if other not in info.data:  # its own error is reported
            return value
        if (value is None) == (info.data[other] is None):
            count = "neither" if value is None else "both"
            raise InputError(f"Exactly one of {other} and {info.field_name} is required, got {count}.")
        return value

    return AfterValidator(checked)


class NamedModel(Section):
    """Model without settings; input shape and number of classes come from the data."""

    name: Literal["wide-resnet-16-4", "wide-resnet-40-4", "conv-net", "purchase-mlp", "logistic-regression"]


class Mlp(Section):
    """Linear layers with ReLU activations in between."""

    name: Literal["mlp"]
    hidden: Sizes = (128,)


class FunctionModel(Section):
    """User-defined training function, named as ``module:function``."""

    name: Literal["function"]
    function: str


ModelConfig: TypeAlias = Annotated[NamedModel | Mlp | FunctionModel, Field(discriminator="name")]


class _SizedDataConfig(Section):
    """Number of training examples, and of test examples among the rest; None means all."""

    num_examples: PositiveInt | None = None
    num_test: PositiveInt | None = None


class Digits(_SizedDataConfig):
    """Handwritten digits that ship with dpaudit."""

    name: Literal["digits"]


class Files(_SizedDataConfig):
    """Data set read from its official files in a directory."""

    name: Literal["cifar10", "purchase100", "location", "idx"]
    directory: str


class Random(Section):
    """Random pixels and classes; ``num_test`` defaults to a fifth of ``num_examples``."""

    name: Literal["random"]
    num_examples: PositiveInt = 50_000
    num_test: PositiveInt | None = None
    shape: Sizes = (3, 32, 32)
    num_classes: PositiveInt = 10
    seed: NonNegativeInt = 0


DataConfig: TypeAlias = Annotated[Digits | Files | Random, Field(discriminator="name")]


class SgdConfig(Section):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    learning_rate: LearningRate = 1.0
    momentum: Decay = 0.0
    weight_decay: Decay = 0.0


class AdamConfig(Section):
    """Adam optimizer."""

    name: Literal["adam"]
    learning_rate: LearningRate = 1e-3
    weight_decay: Decay = 0.0


OptimizerConfig: TypeAlias = Annotated[SgdConfig | AdamConfig, Field(discriminator="name")]


class NoiseTooSmallConfig(Section):
    """Noise with ``factor`` times the claimed standard deviation."""

    name: Literal["noise-too-small"]
    factor: NonNegative = 0.8


class ClippingFault(Section):
    """Gradients that are not clipped, or are clipped only after averaging."""

    name: Literal["unclipped", "clipped-after-mean"]


class FewSeedsConfig(Section):
    """Noise from an RNG that is reseeded in every step with one of ``num_seeds`` seeds."""

    name: Literal["few-seeds"]
    num_seeds: PositiveInt = 100


class ShuffledBatchesConfig(Section):
    """Shuffled epochs cut into batches, accounted for as Poisson sampling."""

    name: Literal["shuffled-batches"]


FaultConfig: TypeAlias = Annotated[
    NoiseTooSmallConfig | ClippingFault | FewSeedsConfig | ShuffledBatchesConfig, Field(discriminator="name")
]


class TrainingConfig(Section):
    """DP-SGD settings, from which the claim is derived.

    Without noise nothing is claimed: only black-box audits accept a noise multiplier of zero. With
    ``multiplicity``, the gradients of that many flipped and cropped copies of an image are averaged before
    clipping.
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
    multiplicity: Multiplicity | None = None
    optimizer: OptimizerConfig = SgdConfig(name="sgd")
    fault: FaultConfig | None = None


class CanaryConfig(Section):
    """Gradient canaries; ``scale`` is their norm relative to the clipping norm."""

    kind: Literal["mixture", "dirac", "constant", "random-direction"] = "mixture"
    scale: Positive = 10.0
    moving: bool = False


class ExampleConfig(Section):
    """Input canaries that need no optimization."""

    kind: Literal["blank", "mislabelled"]


class AdversarialConfig(Section):
    """Input canaries perturbed to maximize their loss."""

    kind: Literal["adversarial"]
    num_steps: PositiveInt = 20
    step_size: Positive = 0.01
    radius: Positive = 0.03


class CraftedConfig(Section):
    """Input canaries optimized so that their gradients are orthogonal to those of other examples."""

    kind: Literal["crafted"] = "crafted"
    num_steps: PositiveInt = 50
    step_size: Positive = 0.1
    every: PositiveInt | None = None
    long: bool = False


class ClipBkdConfig(Section):
    """Example along the direction in which the data vary least, with an unlikely class."""

    kind: Literal["clip-bkd"]


class GivenConfig(Section):
    """User-selected example: the held-out one at ``index``, or an array in a NumPy ``file``.

    If ``target`` is omitted, a held-out example keeps its own class.
    """

    kind: Literal["example"]
    index: NonNegativeInt | None = None
    file: str | None = None
    target: NonNegativeInt | None = None


def _gradient_by_default(raw: Any) -> Any:
    """Treat a table without a kind as a gradient canary."""
    return {"kind": "mixture", **raw} if isinstance(raw, Mapping) else raw


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
    """Independent random initial weights for every model."""

    kind: Literal["random"] = "random"


class PretrainedConfig(Section):
    """The same initial weights for all models, trained on the held-out examples without privacy."""

    kind: Literal["pre-trained"]
    num_steps: PositiveInt = 1_000
    batch_size: PositiveInt = 64
    learning_rate: LearningRate = 0.1


def _as_table(raw: Any) -> Any:
    """Turn a bare kind into a table."""
    return {"kind": raw} if isinstance(raw, str) else raw


Initialization: TypeAlias = Annotated[
    Annotated[RandomWeightsConfig | PretrainedConfig, Field(discriminator="kind")] | None,
    BeforeValidator(_as_table),
]


def _known(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for name in names or ():
        if name not in NAMES:
            raise InputError(
                f"methods must be {_validate.either(NAMES)}, got {name!r}.{_validate.suggestion(name, NAMES)}"
            )
    return names


Methods: TypeAlias = Annotated[tuple[str, ...] | None, Field(strict=False), AfterValidator(_known)]


class _AuditConfig(Section):
    """Keys shared by all modes.

    If ``methods`` is omitted, the bounds of all methods are reported; ``canary`` defaults to that of the
    threat model.
    """

    confidence: Confidence = 0.95
    methods: Methods = None
    canary: AnyCanary = None


class _StepAuditConfig(_AuditConfig):
    """Keys of the modes that observe individual steps.

    ``held_out`` is the number of examples from which input canaries are made.
    """

    first_steps: PositiveInt | None = None
    held_out: PositiveInt | None = None
    stop_on_violation: bool = False


class OneRunConfig(_StepAuditConfig):
    """Many canaries in one training run.

    ``score``, ``num_guesses`` and ``initialization`` apply only to audits of the final model.
    """

    mode: Literal["one-run"] = "one-run"
    num_canaries: PositiveInt | None = None
    num_guesses: PositiveInt | None = None
    score: ScoreName | None = None
    initialization: Initialization = None


class PaperConfig(_StepAuditConfig):
    """Two batches per step and a single canary, as in the paper."""

    mode: Literal["paper"]
    num_canaries: Literal[1] = 1
    canary_rate: Rate = 1.0
    residual: bool = False


class EndToEndConfig(_AuditConfig):
    """One observation of the whole training run per canary."""

    mode: Literal["end-to-end"]
    num_canaries: PositiveInt | None = None


class ManyRunsConfig(_AuditConfig):
    """One observation from each of many training runs; every second run has the canary in its data.

    If ``threshold`` is omitted, the number of scores determines the rule.
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
    """Sequential execution in this process."""

    kind: Literal["serial"]


class ProcessesConfig(Section):
    """Processes on this machine; ``num_workers`` defaults to one per core."""

    kind: Literal["processes"] = "processes"
    num_workers: PositiveInt | None = None
    max_retries: NonNegativeInt = 3


class RayConfig(Section):
    """Ray, on this machine or on the cluster at ``address``; resources are per group of models."""

    kind: Literal["ray"]
    address: str | None = None
    num_cpus: NonNegative = 1.0
    num_gpus: NonNegative = 0.0
    max_retries: NonNegativeInt = 3


def _processes_by_default(raw: Any) -> Any:
    """Turn a bare kind into a table; a table without a kind selects processes."""
    raw = _as_table(raw)
    return {"kind": "processes", **raw} if isinstance(raw, dict) else raw


PoolConfig: TypeAlias = Annotated[
    Annotated[SerialConfig | ProcessesConfig | RayConfig, Field(discriminator="kind")],
    BeforeValidator(_processes_by_default),
]

"""The config of an experiment, and checks that its tables are consistent.

``_OPTIONS`` lists the modes and canaries of each threat model; to add a threat model, add an entry there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments.config._schema import (
    AdversarialConfig,
    AuditConfig,
    CanaryConfig,
    ClipBkdConfig,
    CraftedConfig,
    DataConfig,
    EndToEndConfig,
    ExampleConfig,
    FunctionModel,
    GivenConfig,
    ManyRunsConfig,
    ModelConfig,
    NonNegative,
    NonNegativeInt,
    OneRunConfig,
    PaperConfig,
    PathText,
    PoolConfig,
    PretrainedConfig,
    RandomWeightsConfig,
    Section,
    ShuffledBatchesConfig,
    TrainingConfig,
)

_FINAL_MODEL_KEYS = "score", "initialization", "num_guesses"


@dataclass(frozen=True)
class _AuditOptions:
    """Modes, canaries and defaults of a threat model."""

    modes: tuple[type[Section], ...]
    canaries: tuple[type[Section], ...]
    default_canary: Section
    unused: tuple[str, ...]
    """Keys of its modes that apply only to other threat models."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other keys; ``held_out`` is the number of held-out examples."""


def _tags(sections: tuple[type[Section], ...], key: str) -> str:
    """Return the tags of these sections, which are the values of ``key``, as part of a sentence."""
    names = [name for section in sections for name in get_args(section.model_fields[key].annotation)]
    return ", ".join(map(repr, names))


_OPTIONS: Mapping[str, _AuditOptions] = {
    ThreatModel.GRADIENT.value: _AuditOptions(
        (OneRunConfig, PaperConfig, EndToEndConfig),
        (CanaryConfig,),
        CanaryConfig(),
        unused=("held_out", *_FINAL_MODEL_KEYS),
    ),
    ThreatModel.INPUT.value: _AuditOptions(
        (OneRunConfig, PaperConfig),
        (CraftedConfig, ExampleConfig, AdversarialConfig),
        CraftedConfig(),
        unused=_FINAL_MODEL_KEYS,
        defaults={"held_out": 128},
    ),
    ThreatModel.BLACK_BOX.value: _AuditOptions(
        (ManyRunsConfig, OneRunConfig),
        (ExampleConfig, ClipBkdConfig, GivenConfig),
        ExampleConfig(kind="mislabelled"),
        unused=("first_steps", "stop_on_violation"),
        defaults={"held_out": 128, "score": "log-odds", "initialization": RandomWeightsConfig()},
    ),
}


def _require_known_threat_model(name: str) -> str:
    """Return the name of the threat model; raise if it is unknown."""
    names = [model.value for model in ThreatModel]
    if name not in names:
        raise InputError(f"Expected threat_model to be one of {', '.join(map(repr, names))}, got {name!r}.")
    return name


def _with_mode(raw: Any, info: ValidationInfo) -> Any:
    """Return the audit table; the default mode of black-box audits is ``many-runs``."""
    if info.data.get("threat_model") != ThreatModel.BLACK_BOX.value:
        return raw
    if isinstance(raw, OneRunConfig) and not raw.model_fields_set:  # the file has no audit table
        return ManyRunsConfig()
    return {"mode": "many-runs", **raw} if isinstance(raw, dict) else raw


def _with_noise(training: TrainingConfig, info: ValidationInfo) -> TrainingConfig:
    """Raise on DP-SGD without noise in audits that test a claim."""
    is_noiseless = training.noise_multiplier == 0
    if is_noiseless and info.data.get("threat_model") != ThreatModel.BLACK_BOX.value:
        raise InputError(
            "Expected noise_multiplier=0 in (0, inf): without noise nothing is claimed; only threat_model = "
            "'black-box' reports a bound without a claim."
        )
    return training


def _with_defaults(audit: Any, info: ValidationInfo) -> Any:
    """Return the audit with the defaults of its threat model; raise if the two are incompatible."""
    name = info.data.get("threat_model")
    if name is None:  # its own error is reported
        return audit
    options = _OPTIONS[name]
    if type(audit) not in options.modes:
        raise InputError(
            f"Expected mode to be one of {_tags(options.modes, 'mode')} with threat_model = {name!r}, "
            f"got {audit.mode!r}."
        )
    if audit.canary is not None and not isinstance(audit.canary, options.canaries):
        raise InputError(
            f"Expected canary.kind to be one of {_tags(options.canaries, 'kind')} with threat_model = "
            f"{name!r}, got {audit.canary.kind!r}."
        )
    _require_no_unused(name, options, audit)
    defaults = {"canary": options.default_canary, **options.defaults}
    missing = {
        k: v for k, v in defaults.items() if k in type(audit).model_fields and getattr(audit, k) is None
    }
    return audit.model_copy(update=missing)


def _require_no_unused(name: str, options: _AuditOptions, audit: Any) -> None:
    """Raise on a key that applies only to other threat models."""
    unused = options.unused
    if name == ThreatModel.BLACK_BOX.value and isinstance(audit, OneRunConfig):
        unused = (*unused, "methods")  # it always reports the same two bounds
    for key in unused:
        if value := getattr(audit, key, None):
            shown = getattr(value, "kind", value)
            raise InputError(f"Expected no {key} with threat_model = {name!r}, got {key} = {shown}.")


def _require_consistent(config: Config) -> None:
    """Raise if tables are inconsistent with each other."""
    if isinstance(config.model, FunctionModel):
        _require_for_function(config)
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        _require_for_black_box(config)
    if config.pool is not None and not isinstance(config.audit, ManyRunsConfig):
        raise InputError(f"Expected no pool with mode = {config.audit.mode!r}, which trains a single model.")


def _require_for_function(config: Config) -> None:
    if not isinstance(config.audit, ManyRunsConfig):
        raise InputError(
            "Expected threat_model = 'black-box' and mode = 'many-runs' with a training function."
        )
    if isinstance(config.audit.initialization, PretrainedConfig):
        raise InputError(
            "Expected no pre-trained initialization with a training function, which builds its own models."
        )
    if isinstance(config.audit.canary, ClipBkdConfig):
        raise InputError(
            "Expected a canary.kind other than 'clip-bkd', which needs the model, with a training function."
        )
    if config.training.fault is not None:
        raise InputError(
            "Expected no training.fault with a training function: no fault can be injected into it."
        )


def _require_for_black_box(config: Config) -> None:
    if isinstance(config.training.fault, ShuffledBatchesConfig):
        raise InputError("Expected a fault other than 'shuffled-batches' with threat_model = 'black-box'.")
    canary = config.audit.canary
    if isinstance(config.audit, ManyRunsConfig):
        _require_one_example(canary)
        return
    many = isinstance(canary, ExampleConfig) and canary.kind == "mislabelled"
    many = many or (isinstance(canary, GivenConfig) and canary.index is None and canary.file is None)
    if not many:
        raise InputError(
            "Expected canary.kind to be 'mislabelled', or 'example' without an index and a file, with mode = "
            "'one-run', which needs many different canaries."
        )
    if config.training.noise_multiplier == 0:
        raise InputError("Expected mode = 'many-runs' with noise_multiplier = 0.")


def _require_one_example(canary: object) -> None:
    if not isinstance(canary, GivenConfig):
        return
    if (canary.index is None) == (canary.file is None):
        raise InputError("Expected exactly one of index and file with canary.kind = 'example'.")
    if canary.file is not None and canary.target is None:
        raise InputError("Expected a target, the class of the canary, with canary.file.")


class Config(Section):
    """Config of one ``dpaudit run``.

    If ``seed`` is omitted, the operating system provides one. ``output`` is the run's directory.
    """

    output: PathText
    seed: NonNegativeInt | None = None
    threat_model: Annotated[str, AfterValidator(_require_known_threat_model)] = ThreatModel.GRADIENT.value
    device: str = "cpu"
    checkpoint_seconds: NonNegative = 30.0
    model: ModelConfig
    data: DataConfig
    training: Annotated[TrainingConfig, AfterValidator(_with_noise)]
    audit: Annotated[AuditConfig, AfterValidator(_with_defaults), BeforeValidator(_with_mode)] = Field(
        OneRunConfig(), validate_default=True
    )
    pool: PoolConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require_consistent(self)
        return self

    def identity(self) -> dict[str, Any]:
        """Return the values that identify a run: all except output, checkpoint interval and pool."""
        return self.model_dump(mode="json", exclude={"output", "checkpoint_seconds", "pool"})

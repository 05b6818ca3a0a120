"""The config of an experiment, and the checks that its tables go together.

``_OPTIONS`` has the modes and canaries of each threat model; a new threat model is an entry there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments.config._fields import NonNegative, NonNegativeInt, PathText, Section
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
    OneRunConfig,
    PaperConfig,
    PoolConfig,
    PretrainedConfig,
    RandomWeightsConfig,
    ShuffledBatchesConfig,
    TrainingConfig,
)

_FINAL_MODEL_KEYS = "score", "initialization", "num_guesses"
_STEP_KEYS = "first_steps", "stop_on_violation"


@dataclass(frozen=True)
class _AuditOptions:
    """The modes and canaries of a threat model, and its defaults."""

    modes: tuple[type[Section], ...]
    canaries: tuple[type[Section], ...]
    default_canary: Section
    unused: tuple[str, ...]
    """Keys that its modes have for other threat models."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other keys; ``held_out`` is the number of held-out examples."""

    @property
    def kinds(self) -> str:
        """The names of the canaries."""
        names = [name for one in self.canaries for name in get_args(one.model_fields["kind"].annotation)]
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
        unused=_STEP_KEYS,
        defaults={"held_out": 128, "score": "log-odds", "initialization": RandomWeightsConfig()},
    ),
}


def _require_known_threat_model(name: str) -> str:
    """Return the name of a threat model; raise if it is unknown."""
    known = [model.value for model in ThreatModel]
    if name not in known:
        raise InputError(f"Expected threat_model to be {', '.join(map(repr, known))}, got {name!r}.")
    return name


def _with_mode(raw: Any, info: ValidationInfo) -> Any:
    """Return the audit's table, with many models as the default mode of black-box audits."""
    if info.data.get("threat_model") != ThreatModel.BLACK_BOX.value:
        return raw
    if isinstance(raw, OneRunConfig) and not raw.model_fields_set:  # there is no table
        return ManyRunsConfig()
    return {"mode": "many-runs", **raw} if isinstance(raw, dict) else raw


def _with_noise(training: TrainingConfig, info: ValidationInfo) -> TrainingConfig:
    """Refuse a training without noise where a claim is tested."""
    is_noiseless = training.noise_multiplier == 0
    if is_noiseless and info.data.get("threat_model") != ThreatModel.BLACK_BOX.value:
        raise InputError(
            "Expected noise_multiplier=0 in (0, inf): without noise nothing is claimed, and only an audit "
            "with threat_model = 'black-box' has a bound to report."
        )
    return training


def _with_defaults(audit: Any, info: ValidationInfo) -> Any:
    """Return the audit with the defaults of its threat model; raise if the two do not go together."""
    name = info.data.get("threat_model")
    if name is None:  # it has a mistake of its own
        return audit
    options = _OPTIONS[name]
    if type(audit) not in options.modes:
        raise InputError(f"Expected a mode that threat_model = {name!r} has, got mode = {audit.mode!r}.")
    if audit.canary is not None and not isinstance(audit.canary, options.canaries):
        raise InputError(
            f"Expected a canary.kind of {options.kinds} with threat_model = {name!r}, "
            f"got {audit.canary.kind!r}."
        )
    unused = options.unused
    if name == ThreatModel.BLACK_BOX.value and isinstance(audit, OneRunConfig):
        unused = (*unused, "methods")  # it has two bounds of its own
    for key in unused:
        if value := getattr(audit, key, None):
            given = getattr(value, "kind", value)
            raise InputError(f"Expected no {key} with threat_model = {name!r}, got {key} = {given}.")
    defaults = {"canary": options.default_canary, **options.defaults}
    missing = {
        k: v for k, v in defaults.items() if k in type(audit).model_fields and getattr(audit, k) is None
    }
    return audit.model_copy(update=missing)


def _require_consistent(config: Config) -> None:
    """Raise if tables contradict each other."""
    if isinstance(config.model, FunctionModel):
        _require_for_function(config)
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        _require_for_black_box(config)
    if config.pool is not None and not isinstance(config.audit, ManyRunsConfig):
        raise InputError(f"Expected no pool with mode = {config.audit.mode!r}, which trains one model.")


def _require_for_function(config: Config) -> None:
    if not isinstance(config.audit, ManyRunsConfig):
        raise InputError("Expected threat_model = 'black-box' and mode = 'many-runs' with a function.")
    if isinstance(config.audit.initialization, PretrainedConfig):
        raise InputError("Expected no initialization with a function: it makes its own models.")
    if isinstance(config.audit.canary, ClipBkdConfig):
        raise InputError("Expected another canary than 'clip-bkd' with a function: it needs the model.")
    if config.training.fault is not None:
        raise InputError("Expected no training.fault with a function, which is as it is.")


def _require_for_black_box(config: Config) -> None:
    if isinstance(config.training.fault, ShuffledBatchesConfig):
        raise InputError("Expected another fault than 'shuffled-batches' with threat_model = 'black-box'.")
    canary = config.audit.canary
    if isinstance(config.audit, ManyRunsConfig):
        _require_one_example(canary)
        return
    many = isinstance(canary, ExampleConfig) and canary.kind == "mislabelled"
    many = many or (isinstance(canary, GivenConfig) and canary.index is None and canary.file is None)
    if not many:
        raise InputError(
            "Expected the canary kind 'mislabelled', or 'example' without an index, for many different "
            "canaries in one run."
        )
    if config.training.noise_multiplier == 0:
        raise InputError("Expected mode = 'many-runs' with noise_multiplier=0.")


def _require_one_example(canary: object) -> None:
    if not isinstance(canary, GivenConfig):
        return
    if (canary.index is None) == (canary.file is None):
        raise InputError("Expected exactly one of index and file for the canary kind 'example'.")
    if canary.file is not None and canary.target is None:
        raise InputError("Expected a target, its class, for the canary in a file.")


class Config(Section):
    """What ``dpaudit run`` does.

    Without a ``seed``, the random seed comes from the operating system. ``output`` is the run's directory.
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
        """Return what identifies a run: everything but the output, the checkpoints and the pool."""
        return self.model_dump(mode="json", exclude={"output", "checkpoint_seconds", "pool"})

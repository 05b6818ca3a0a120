"""What each threat model can be audited with; a new one is a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationInfo

from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments.config._audits import EndToEndConfig, ManyRunsConfig, OneRunConfig, PaperConfig
from dpaudit.experiments.config._canaries import (
    AdversarialConfig,
    CanaryConfig,
    ClipBkdConfig,
    CraftedConfig,
    ExampleConfig,
    GivenConfig,
)
from dpaudit.experiments.config._fields import Section
from dpaudit.experiments.config._starts import RandomConfig
from dpaudit.experiments.config._training import TrainingConfig

__all__ = ["available", "fitting", "noisy", "with_mode"]

_OF_FINAL_MODEL = "score", "initialization", "num_guesses"
_OF_STEPS = "first_steps", "stop_on_violation"


@dataclass(frozen=True)
class _Fit:
    """The modes and canaries of a threat model, and what is usual."""

    modes: tuple[type[Section], ...]
    canaries: tuple[type[Section], ...]
    usual_canary: Section
    unused: tuple[str, ...]
    """Keys that its modes have for other threat models."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """What keys are, unless said otherwise; ``held_out`` is how many examples are held out."""

    @property
    def kinds(self) -> str:
        """The names of the canaries."""
        names = [name for one in self.canaries for name in get_args(one.model_fields["kind"].annotation)]
        return ", ".join(map(repr, names))


_FITS: Mapping[str, _Fit] = {
    ThreatModel.GRADIENT.value: _Fit(
        (OneRunConfig, PaperConfig, EndToEndConfig),
        (CanaryConfig,),
        CanaryConfig(),
        unused=("held_out", *_OF_FINAL_MODEL),
    ),
    ThreatModel.INPUT.value: _Fit(
        (OneRunConfig, PaperConfig),
        (CraftedConfig, ExampleConfig, AdversarialConfig),
        CraftedConfig(),
        unused=_OF_FINAL_MODEL,
        usual={"held_out": 128},
    ),
    ThreatModel.BLACK_BOX.value: _Fit(
        (ManyRunsConfig, OneRunConfig),
        (ExampleConfig, ClipBkdConfig, GivenConfig),
        ExampleConfig(kind="mislabelled"),
        unused=_OF_STEPS,
        usual={"held_out": 128, "score": "log-odds", "initialization": RandomConfig()},
    ),
}


def available(name: str) -> str:
    """A threat model that a run can have."""
    known = [model.value for model in ThreatModel]
    if name not in known:
        raise InputError(f"Expected threat_model to be {', '.join(map(repr, known))}, got {name!r}.")
    return name


def with_mode(raw: Any, info: ValidationInfo) -> Any:
    """Of many models, where the final model is all that is seen and nothing else is said."""
    if info.data.get("threat_model") != ThreatModel.BLACK_BOX.value:
        return raw
    if isinstance(raw, OneRunConfig) and not raw.model_fields_set:  # there is no table
        return ManyRunsConfig()
    return {"mode": "many-runs", **raw} if isinstance(raw, dict) else raw


def noisy(training: TrainingConfig, info: ValidationInfo) -> TrainingConfig:
    """A training that claims something, or one of which no claim is tested."""
    silent = training.noise_multiplier == 0
    if silent and info.data.get("threat_model") != ThreatModel.BLACK_BOX.value:
        raise InputError(
            "Expected noise_multiplier=0 in (0, inf): without noise nothing is claimed, and only an audit "
            "with threat_model = 'black-box' has a bound to report."
        )
    return training


def fitting(audit: Any, info: ValidationInfo) -> Any:
    """The audit with what its threat model fills in; refused if the two do not go together."""
    name = info.data.get("threat_model")
    if name is None:  # it has a mistake of its own
        return audit
    fit = _FITS[name]
    if type(audit) not in fit.modes:
        raise InputError(f"Expected a mode that threat_model = {name!r} has, got mode = {audit.mode!r}.")
    if audit.canary is not None and not isinstance(audit.canary, fit.canaries):
        raise InputError(
            f"Expected a canary.kind of {fit.kinds} with threat_model = {name!r}, got {audit.canary.kind!r}."
        )
    unused = fit.unused
    if name == ThreatModel.BLACK_BOX.value and isinstance(audit, OneRunConfig):
        unused = (*unused, "methods")  # it has two bounds of its own
    for key in unused:
        if value := getattr(audit, key, None):
            said = getattr(value, "kind", value)
            raise InputError(f"Expected no {key} with threat_model = {name!r}, got {key} = {said}.")
    usual = {"canary": fit.usual_canary, **fit.usual}
    missing = {k: v for k, v in usual.items() if k in type(audit).model_fields and getattr(audit, k) is None}
    return audit.model_copy(update=missing)

"""What each threat model can be audited with; a new one is a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationInfo

from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments.config._audits import EndToEndConfig, OneRunConfig, PaperConfig
from dpaudit.experiments.config._canaries import (
    AdversarialConfig,
    CanaryConfig,
    CraftedConfig,
    ExampleConfig,
)
from dpaudit.experiments.config._fields import Section

__all__ = ["available", "fitting"]


@dataclass(frozen=True)
class _Fit:
    """The modes and canaries of a threat model; the first canary is the usual one."""

    modes: tuple[type[Section], ...]
    canaries: tuple[type[Section], ...]
    held_out: int | None
    """How many examples are held out, unless said otherwise; None: there is no use for any."""

    @property
    def kinds(self) -> str:
        """The names of the canaries."""
        names = [name for one in self.canaries for name in get_args(one.model_fields["kind"].annotation)]
        return ", ".join(map(repr, names))


_FITS: Mapping[str, _Fit] = {
    ThreatModel.GRADIENT.value: _Fit((OneRunConfig, PaperConfig, EndToEndConfig), (CanaryConfig,), None),
    ThreatModel.INPUT.value: _Fit(
        (OneRunConfig, PaperConfig), (CraftedConfig, ExampleConfig, AdversarialConfig), 128
    ),
}


def available(name: str) -> str:
    """A threat model that a run can have."""
    known = [model.value for model in ThreatModel]
    if name not in known:
        raise InputError(f"Expected threat_model to be {', '.join(map(repr, known))}, got {name!r}.")
    if name not in _FITS:
        there = " or ".join(map(repr, _FITS))
        raise InputError(f"The threat model {name!r} is not there yet; expected {there}.")
    return name


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
    held_out = getattr(audit, "held_out", None)
    if held_out is not None and fit.held_out is None:
        raise InputError(f"Expected no held_out with threat_model = {name!r}, got held_out = {held_out}.")
    update: dict[str, Any] = {"canary": audit.canary or fit.canaries[0]()}
    if fit.held_out is not None:
        update["held_out"] = held_out or fit.held_out
    return audit.model_copy(update=update)

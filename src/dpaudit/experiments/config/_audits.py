"""How the training is audited."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag

from dpaudit.errors import InputError
from dpaudit.experiments.config._fields import Confidence, Positive, Rate, Section, Whole
from dpaudit.methods import NAMES

__all__ = ["AuditConfig", "CanaryConfig", "EndToEndConfig", "OneRunConfig", "PaperConfig"]


def _known(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for name in names or ():
        if name not in NAMES:
            raise InputError(f"Expected methods of {', '.join(map(repr, NAMES))}, got {name!r}.")
    return names


Methods: TypeAlias = Annotated[tuple[str, ...] | None, Field(strict=False), AfterValidator(_known)]


class CanaryConfig(Section):
    """The gradients that are inserted, ``scale`` times the clipping norm."""

    kind: Literal["dirac", "constant", "mixed", "random-direction"] = "dirac"
    scale: Positive = 10.0
    moving: bool = False


class _Audit(Section):
    """What all modes have. Without ``methods``, bounds of all of them are reported."""

    confidence: Confidence = 0.95
    methods: Methods = None
    canary: CanaryConfig = CanaryConfig()


class OneRunConfig(_Audit):
    """Many canaries in every step of the training."""

    mode: Literal["one-run"] = "one-run"
    num_canaries: Whole | None = None
    stop_on_violation: bool = False


class PaperConfig(_Audit):
    """The paper's two batches a step, with one canary."""

    mode: Literal["paper"]
    num_canaries: Literal[1] = 1
    canary_rate: Rate = 1.0
    residual: bool = False
    stop_on_violation: bool = False


class EndToEndConfig(_Audit):
    """One observation of the whole training from each canary."""

    mode: Literal["end-to-end"]
    num_canaries: Whole | None = None


def _mode(raw: Any) -> Any:
    return raw.get("mode", "one-run") if isinstance(raw, dict) else getattr(raw, "mode", "one-run")


AuditConfig: TypeAlias = Annotated[
    Annotated[OneRunConfig, Tag("one-run")]
    | Annotated[PaperConfig, Tag("paper")]
    | Annotated[EndToEndConfig, Tag("end-to-end")],
    Discriminator(_mode),
]

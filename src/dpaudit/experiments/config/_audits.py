"""How the training is audited."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag

from dpaudit.errors import InputError
from dpaudit.experiments.config._canaries import AnyCanary
from dpaudit.experiments.config._fields import Confidence, Count, Rate, Section, Whole
from dpaudit.experiments.config._starts import Initialization, ScoreName
from dpaudit.methods import NAMES

__all__ = ["AuditConfig", "EndToEndConfig", "ManyRunsConfig", "OneRunConfig", "PaperConfig"]


def _known(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for name in names or ():
        if name not in NAMES:
            raise InputError(f"Expected methods of {', '.join(map(repr, NAMES))}, got {name!r}.")
    return names


Methods: TypeAlias = Annotated[tuple[str, ...] | None, Field(strict=False), AfterValidator(_known)]


class _Audit(Section):
    """What all modes have. Without ``methods``, bounds of all of them are reported.

    Without ``canary`` there is the usual one of the threat model.
    """

    confidence: Confidence = 0.95
    methods: Methods = None
    canary: AnyCanary = None


class _OfSteps(_Audit):
    """What modes that look at single steps have.

    ``held_out`` is how many examples input canaries are made from.
    """

    first_steps: Whole | None = None
    held_out: Whole | None = None
    stop_on_violation: bool = False


class OneRunConfig(_OfSteps):
    """Many canaries in one training.

    What only the final model is asked for: ``score``, how many of the canaries are guessed, and where the
    model starts.
    """

    mode: Literal["one-run"] = "one-run"
    num_canaries: Whole | None = None
    num_guesses: Whole | None = None
    score: ScoreName | None = None
    initialization: Initialization = None


class PaperConfig(_OfSteps):
    """The paper's two batches a step, with one canary."""

    mode: Literal["paper"]
    num_canaries: Literal[1] = 1
    canary_rate: Rate = 1.0
    residual: bool = False


class EndToEndConfig(_Audit):
    """One observation of the whole training from each canary."""

    mode: Literal["end-to-end"]
    num_canaries: Whole | None = None


class ManyRunsConfig(_Audit):
    """One observation from each of many trainings; the canary is in every second one's data.

    Without ``threshold`` the rule is chosen by the number of scores.
    """

    mode: Literal["many-runs"] = "many-runs"
    num_models: Count = 2_000
    score: ScoreName | None = None
    threshold: Literal["simultaneous", "held-out"] | None = None
    held_out: Whole | None = None
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

"""Types of config values, validated by the same functions as dpaudit's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from dpaudit import _validate
from dpaudit.errors import InputError

_LARGEST_RATE = 1e30  # of an optimizer: updates are computed in single precision, up to 3e38


class Section(BaseModel):
    """Immutable table of a config; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _named(check: Callable[..., Any], **more: Any) -> AfterValidator:
    """Return a validator of a single value that names the key in its error."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        return check(info.field_name, value, **more)

    return AfterValidator(checked)


def _each_positive(value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
    return tuple(_validate.whole(str(info.field_name), one) for one in value)


def _path(value: str) -> str:
    """Raise on an empty path, which would mean the current directory."""
    if not value.strip():
        raise InputError(f"Expected a path, got {value!r}; use '.' for the current directory.")
    return value


def _in_range(name: str, value: float) -> float:
    if value > _LARGEST_RATE:
        raise InputError(f"Expected {name}={value:g} to be at most {_LARGEST_RATE:g}.")
    return value


Positive: TypeAlias = Annotated[float, _named(_validate.positive)]
NonNegative: TypeAlias = Annotated[float, _named(_validate.at_least, low=0.0)]
LearningRate: TypeAlias = Annotated[Positive, _named(_in_range)]
Decay: TypeAlias = Annotated[NonNegative, _named(_in_range)]
Multiplicity: TypeAlias = Annotated[int, _named(_validate.whole, high=1000)]
PositiveInt: TypeAlias = Annotated[int, _named(_validate.whole)]
Steps: TypeAlias = Annotated[int, AfterValidator(_validate.num_steps)]
Count: TypeAlias = Annotated[int, _named(_validate.whole, low=2, high=1_000_000)]
NonNegativeInt: TypeAlias = Annotated[int, _named(_validate.whole, low=0)]
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
            given = "neither" if value is None else "both"
            raise InputError(f"Expected exactly one of {other} and {info.field_name}, got {given}.")
        return value

    return AfterValidator(checked)

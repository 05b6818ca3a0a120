"""Types of the values in a config, checked by the same functions as the arguments of dpaudit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from dpaudit import _validate
from dpaudit.errors import InputError


class Section(BaseModel):
    """A table of the file: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _named(check: Callable[..., Any], **more: Any) -> AfterValidator:
    """Return a check of a single value that names the key in its error."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        return check(info.field_name, value, **more)

    return AfterValidator(checked)


def _each_positive(value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
    return tuple(_validate.whole(str(info.field_name), one) for one in value)


def _path(value: str) -> str:
    """Refuse an empty path, which would stand for the current directory."""
    if not value.strip():
        raise InputError(f"Expected a path, got {value!r}; the current directory is '.'.")
    return value


Positive: TypeAlias = Annotated[float, _named(_validate.positive)]
NonNegative: TypeAlias = Annotated[float, _named(_validate.at_least, low=0.0)]
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
    """Return a check that exactly one of this value and ``other``, the key before it, is given."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        if other not in info.data:  # it has a mistake of its own
            return value
        if (value is None) == (info.data[other] is None):
            given = "neither" if value is None else "both"
            raise InputError(f"Expected exactly one of {other} and {info.field_name}, got {given}.")
        return value

    return AfterValidator(checked)

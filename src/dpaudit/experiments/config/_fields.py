"""Types of single values, checked by the sentences that all of dpaudit uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from dpaudit import _validate
from dpaudit.errors import InputError


class Section(BaseModel):
    """A table of the file: nothing but the known keys, and nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _named(check: Callable[..., Any], **more: Any) -> AfterValidator:
    """One of the checks of single values, with the key as the name."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        return check(info.field_name, value, **more)

    return AfterValidator(checked)


def _each_whole(value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
    return tuple(_validate.whole(str(info.field_name), one) for one in value)


def _path(value: str) -> str:
    """An empty one would stand for the current directory, which nobody has named."""
    if not value.strip():
        raise InputError(f"Expected a path, got {value!r}; the current directory is '.'.")
    return value


Positive: TypeAlias = Annotated[float, _named(_validate.positive)]
NotNegative: TypeAlias = Annotated[float, _named(_validate.at_least, low=0.0)]
Whole: TypeAlias = Annotated[int, _named(_validate.whole)]
Steps: TypeAlias = Annotated[int, AfterValidator(_validate.num_steps)]
Count: TypeAlias = Annotated[int, _named(_validate.whole, low=2, high=1_000_000)]
Seed: TypeAlias = Annotated[int, _named(_validate.whole, low=0)]
Delta: TypeAlias = Annotated[float, _named(_validate.fraction)]
Confidence: TypeAlias = Annotated[float, AfterValidator(_validate.confidence)]
Rate: TypeAlias = Annotated[float, AfterValidator(_validate.sample_rate)]
PathText: TypeAlias = Annotated[str, AfterValidator(_path)]
Sizes: TypeAlias = Annotated[tuple[int, ...], Field(strict=False), AfterValidator(_each_whole)]


def exactly_one(other: str) -> AfterValidator:
    """Refuses a value beside ``other``, the key before it, and the lack of both."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        if other not in info.data:  # it has a mistake of its own
            return value
        given: Literal["both", "neither"] | None = None
        if value is None and info.data[other] is None:
            given = "neither"
        elif value is not None and info.data[other] is not None:
            given = "both"
        if given is not None:
            raise InputError(f"Expected exactly one of {other} and {info.field_name}, got {given}.")
        return value

    return AfterValidator(checked)

"""What pydantic found, in dpaudit's sentences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dpaudit.experiments.config._config import Config

__all__ = ["Mistake", "mistakes"]

Mistake = tuple[tuple[str, ...], str]

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}


def mistakes(error: ValidationError, raw: Mapping[str, Any]) -> list[Mistake]:
    """Each mistake with the place of its key."""
    return [_mistake(one, raw) for one in error.errors(include_url=False)]


def _mistake(error: ErrorDetails, raw: Mapping[str, Any]) -> Mistake:
    place = _place(error["loc"], raw)
    kind, got = error["type"], error["input"]
    if kind == "missing":
        return place, "Expected a value, got none."
    if kind == "extra_forbidden":
        return place, f"There is no such key; {_suggestion(error['loc'])}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _tag(place, error)
    if kind == "literal_error":
        return place, f"Expected {error['ctx']['expected']}, got {got!r}."
    if kind in _TYPES:
        return place, f"Expected {_TYPES[kind]}, got {got!r}."
    return place, error["msg"].removeprefix("Value error, ")


def _tag(place: tuple[str, ...], error: ErrorDetails) -> Mistake:
    """A name that is none of the known ones."""
    context = error["ctx"]
    key = context["discriminator"].strip("'")
    key = "mode" if key.endswith("()") else key  # the only one that is found by a function
    if error["type"] == "union_tag_not_found":
        if not isinstance(error["input"], Mapping):
            return place, f"Expected a table, got {error['input']!r}."
        return (*place, key), "Expected a value, got none."
    got, known = context["tag"], context["expected_tags"]
    near = difflib.get_close_matches(got, re.findall(r"'([^']*)'", known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return (*place, key), f"Expected one of {known}, got {got!r}{hint}"


def _place(loc: Sequence[str | int], raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys as they stand in the file: without the tags that pydantic puts between them."""
    place: list[str] = []
    value: Any = raw
    for index, part in enumerate(loc):
        inside = isinstance(value, Mapping) and part in value
        if inside:
            value = value[part]
        if inside or (index == len(loc) - 1 and isinstance(value, Mapping)):
            place.append(str(part))
    return tuple(place)


def _suggestion(loc: Sequence[str | int]) -> str:
    known = _keys(Config, [str(part) for part in loc[:-1]])
    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.75)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."


def _keys(section: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the table at this path of fields and tags."""
    found = [section]
    for part in path:
        inner = [one for s in found if part in s.model_fields for one in _sections(s.model_fields[part])]
        found = inner or [s for s in found if part in _names(s)] or found
    return list(found[0].model_fields)


def _sections(field: Any) -> list[type[BaseModel]]:
    """The tables that a field may be."""

    def inside(hint: Any) -> list[type[BaseModel]]:
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            return [hint]
        return [one for part in get_args(hint) for one in inside(part)]

    return inside(field.annotation)


def _names(section: type[BaseModel]) -> list[str]:
    """The tags that choose this table."""
    fields = (section.model_fields[key] for key in ("name", "mode") if key in section.model_fields)
    return [tag for field in fields for tag in get_args(field.annotation)]

"""From a TOML file to a config, or to all of its mistakes at once."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpaudit._foreign import open_file
from dpaudit.errors import InputError
from dpaudit.experiments.config._config import Config
from dpaudit.experiments.config._lines import line_of, lines_of_keys
from dpaudit.experiments.config._mistakes import all_mistakes
from dpaudit.experiments.config._toml import parsed, require_plain

__all__ = ["load_config", "parse_config"]

_LARGEST = 1_000_000  # bytes of a config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config in this file; ``overrides`` are such as ``training.num_steps=50``."""
    try:
        text = _content(Path(path)).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"Expected text in UTF-8 in {path}: {error}.") from error
    return parse_config(text, str(path), overrides)


def _content(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError as error:
        raise InputError(f"Expected a config, but there is no file {path}.") from error
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
    if len(content) > _LARGEST:
        raise InputError(f"Expected a config of at most {_LARGEST:,} bytes, got more in {path}.")
    return content


def parse_config(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """The config in this text; mistakes are told to be in ``name``."""
    raw = parsed(text, name)
    changed = {_override(raw, override) for override in overrides}
    require_plain(raw, name)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = lines_of_keys(text)
        ordered = sorted(all_mistakes(error, raw), key=lambda one: line_of(lines, one[0]) or 0)
        found = [_located(place, sentence, lines, changed) for place, sentence in ordered]
    if len(found) == 1:
        raise InputError(f"{name}, {found[0]}")
    raise InputError(f"{name} has {len(found)} mistakes:\n" + "\n".join(f"  {text}" for text in found))


def _located(
    place: tuple[str, ...], sentence: str, lines: dict[tuple[str, ...], int], changed: set[tuple[str, ...]]
) -> str:
    line = line_of(lines, place)
    where = "--set " if place in changed else "" if line is None else f"line {line}, "
    key = f"{'.'.join(place)}: " if place else ""  # some are of the whole
    return f"{where}{key}{sentence}"


def _override(raw: dict[str, Any], text: str) -> tuple[str, ...]:
    """Put one value in its place; returns the place."""
    key, equals, value = text.partition("=")
    place = tuple(part.strip() for part in key.split("."))
    if not equals or not all(place):
        raise InputError(f"Expected a key and a value such as training.num_steps=50, got {text!r}.")
    table: Any = raw
    for part in place[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise InputError(f"Expected {part} in {text!r} to be a table, but it is {table!r}.")
    table[place[-1]] = _value(value.strip())
    return place


def _value(text: str) -> Any:
    """As TOML reads it; what it cannot read is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text

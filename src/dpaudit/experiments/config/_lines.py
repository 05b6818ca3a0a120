"""Where in a TOML file a key stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["line_of", "lines_of_keys"]

Place: TypeAlias = tuple[str, ...]

_TABLE = re.compile(r"^\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_PART = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
# dots between parts, and each part as a whole: a line of letters alone would be cut in every possible way
_KEY = re.compile(rf"^\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")


def lines_of_keys(text: str) -> dict[Place, int]:
    """The line of every table and key; keys inside of braces have that of the brace."""
    found: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _split(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_split(key[1])), number)
    return found


def line_of(lines: dict[Place, int], place: Sequence[str]) -> int | None:
    """The line of a key, or of the nearest table around it; None if neither is there."""
    for length in range(len(place), 0, -1):
        if tuple(place[:length]) in lines:
            return lines[tuple(place[:length])]
    return None


def _split(dotted: str) -> Place:
    """The parts of a dotted key, read by the TOML reader itself."""
    try:
        nested = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:  # a line inside of a longer text, that only looked like a key
        return ()
    parts: list[str] = []
    value: object = nested
    while isinstance(value, dict):
        [(part, value)] = value.items()
        parts.append(part)
    return tuple(parts)

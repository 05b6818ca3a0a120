"""TOML of anybody: no number and no nesting that the rest cannot bear."""

from __future__ import annotations

import tomllib
from typing import Any

from dpaudit.errors import InputError

__all__ = ["parsed", "require_plain"]

_LARGEST = 2**128  # a seed has as many bits
_DEEPEST = 20


def parsed(text: str, name: str) -> dict[str, Any]:
    """The tables in this text; mistakes are told to be in ``name``."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"Expected TOML in {name}: {error}.") from error
    except ValueError as error:  # of the reader's own numbers
        raise InputError(f"Expected numbers of fewer digits in {name}.") from error
    except RecursionError as error:
        raise InputError(f"Expected at most {_DEEPEST} levels of tables and lists in {name}.") from error


def require_plain(raw: dict[str, Any], name: str) -> None:
    """Refuse what would end in an error about numbers or depth wherever it is used first."""
    level: list[Any] = [raw]
    for _ in range(_DEEPEST):
        if any(isinstance(one, int) and abs(one) > _LARGEST for one in level):
            raise InputError(f"Expected whole numbers of at most 2^128 in {name}.")
        level = [inner for one in level for inner in _inside(one)]
    if level:
        raise InputError(f"Expected at most {_DEEPEST} levels of tables and lists in {name}.")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []

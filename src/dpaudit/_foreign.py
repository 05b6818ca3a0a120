"""Reading what anybody may have written: nothing in it is run, and nothing is without an end."""

from __future__ import annotations

import json
import tokenize
from pathlib import Path
from typing import Any, Final, NoReturn

from dpaudit.errors import InputError

__all__ = ["NOT_AN_ARRAY", "read_json"]

# what numpy and its reader of headers say of bytes that are not what they should be
NOT_AN_ARRAY: Final = (
    EOFError,
    MemoryError,
    OverflowError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)
_LARGEST = 50_000_000  # bytes of a JSON file


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        values = json.loads(_moderate(path, content), parse_constant=_no_constant)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"Expected JSON in {path}, but it cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise InputError(f"Expected a JSON object in {path}, got a {type(values).__name__}.")
    return values


def _moderate(path: Path, content: bytes) -> str:
    if len(content) > _LARGEST:
        raise InputError(f"Expected {path} to have at most {_LARGEST:,} bytes.")
    return content.decode()


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")

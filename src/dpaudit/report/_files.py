"""Files of a run, which may be of anybody: no pickle, nothing without an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dpaudit.errors import InputError

__all__ = ["read_array", "read_json"]

_LARGEST = 50_000_000  # bytes of a JSON file


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object."""
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"Expected {path} to have at most {_LARGEST:,} bytes.")
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"Expected JSON in {path}, but it cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise InputError(f"Expected a JSON object in {path}, got a {type(values).__name__}.")
    return values


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def read_array(path: Path, kinds: str) -> np.ndarray | None:
    """An array of one of these kinds of numpy; None if there is no such file."""
    if not path.exists():
        return None
    try:
        # mapped first: the size that the header tells is checked against the file before memory is taken
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, OverflowError, TypeError) as error:
        raise InputError(f"Expected an array in {path}, but it cannot be read.") from error
    if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in kinds:
        raise InputError(f"Expected numbers in {path}, got something else.")
    return np.array(mapped)

"""Files that the user has to put in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpaudit.errors import InputError

__all__ = ["first_existing"]


def first_existing(directory: str | Path, names: Sequence[str], source: str) -> Path:
    """The first of these files that is there, or the sentence that says which one to put where."""
    folder = Path(directory)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"Expected {' or '.join(names)} in {folder}; put it there, from {source}.")

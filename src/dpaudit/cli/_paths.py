"""Files by their names: what may be read, and writing that is never seen half done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpaudit.errors import InputError

__all__ = ["make_folder", "readable", "reading", "write_text"]

_SUFFIXES = (".npy", ".npz", ".csv", ".parquet")
_EXPECTED = "a .npy, .npz, .csv or .parquet file"


def readable(path: Path) -> str:
    """The suffix of a file that exists and may hold scores."""
    with reading(path):
        if path.is_dir():
            raise InputError(f"Expected {_EXPECTED}, got the directory {path}.")
        path.stat()
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise InputError(f"Expected {_EXPECTED}, got {path}.")
    return suffix


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system says of a file into a sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"Expected {_EXPECTED}, but there is no file {path}.") from error
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error


def make_folder(path: Path) -> None:
    """Make the folder unless it is there."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write beside and rename, so that nobody reads half a file."""
    with _writing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from error

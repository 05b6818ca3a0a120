"""Files of scores by their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpaudit.errors import InputError

__all__ = ["readable", "reading"]

_SUFFIXES = (".npy", ".npz", ".csv", ".parquet")
_EXPECTED = "a .npy, .npz, .csv or .parquet file"


def readable(path: Path) -> str:
    """The suffix of a file that exists and may hold scores."""
    with reading(path):
        if path.is_dir():
            raise InputError(f"Expected {_EXPECTED}, got the directory {path}.")
        path.stat()
        if not path.is_file():  # opening a pipe waits for somebody to write into it
            raise InputError(f"Expected {_EXPECTED}, but {path} is no file.")
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

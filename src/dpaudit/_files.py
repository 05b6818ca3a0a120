"""Writing that is never seen half done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dpaudit.errors import InputError

__all__ = ["make_folder", "remove_unfinished", "write", "write_text"]

_UNFINISHED = ".unfinished"


def make_folder(path: Path) -> None:
    """Make the folder unless it is there."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Delete what was being written when a process was killed; only for a folder that nobody else has."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole."""
    write(path, lambda file: file.write(text.encode()))


def write(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write beside and rename, so that nobody reads half a file, not even after the power fails."""
    with _writing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
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

"""Writing that is never seen half done."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dpaudit.errors import InputError

__all__ = ["expanded", "followed", "locked", "make_folder", "remove", "write", "write_text"]

_UNFINISHED = ".unfinished"
_SPECIAL = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def expanded(path: str | Path) -> Path:
    """With the home directory in the place of ``~``."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"Expected {path} to be a path, but there is no such home directory.") from error


def followed(path: Path) -> Path:
    """The file that a path leads to, so that it is written and the link stays.

    For paths that the user names. A file that dpaudit names itself may be a link that somebody else has put
    there: it is never followed.
    """
    with _writing(path):
        _require_replaceable(path, path.stat)
        return path.resolve()


def make_folder(path: Path) -> None:
    """Make the folder unless it is there."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else runs in this folder meanwhile; a lock ends with its process, however that ends."""
    make_folder(folder)
    with _lock_file(folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"Expected {folder} for this run alone, but another process runs in it."
            ) from error
        _remove_unfinished(folder)
        yield


def _lock_file(folder: Path) -> BinaryIO:
    """Without content; what somebody else may have put there is not followed, emptied or waited for."""
    with _writing(folder):
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        return os.fdopen(handle, "r+b", buffering=0)


def _remove_unfinished(folder: Path) -> None:
    """Delete what was being written when a process was killed."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete the file, if it is there."""
    with _writing(path):
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file as a whole."""
    write(path, lambda file: file.write(text.encode()), private=private)


def write(path: Path, fill: Callable[[BinaryIO], object], *, private: bool = False) -> None:
    """Write beside and rename, so that nobody reads half a file, not even after the power fails.

    Others may read it as far as the user's umask lets them; nobody else does if it is ``private``.
    """
    with _writing(path):
        _require_replaceable(path, path.lstat)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _require_replaceable(path: Path, look: Callable[[], os.stat_result]) -> None:
    """A file takes the place of what is there: of a pipe or a device, nothing would be left."""
    try:
        mode = look().st_mode
    except FileNotFoundError:
        return
    for is_such, name in _SPECIAL:
        if is_such(mode):
            raise InputError(f"Expected {path} to be a file, or not there yet, but it is {name}.")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from error
    except ValueError as error:
        if "\0" in str(path):
            raise InputError(f"Expected a path, got {str(path)!r}.") from error
        raise

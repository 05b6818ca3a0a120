"""Writing that is never seen half done.

Reading what anybody may have written: nothing in it is run, and nothing is without an end. Where two sets of
plain values differ.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np
import numpy.typing as npt

from dpaudit.errors import InputError

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
LARGEST_ARRAY: Final = 2**32  # bytes in memory: a file of a few kilobytes can claim more than there is
_LARGEST = 50_000_000  # bytes of a JSON file


def open_file(path: str | Path) -> BufferedReader:
    """A regular file, to be read: a pipe would wait for somebody to write into it, a device has no end."""
    # not to wait concerns the opening of a pipe only; what was opened is looked at, so that it stays the same
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise InputError(f"Expected {path} to be a file, but it is a pipe or a device.")


def map_array(path: Path) -> npt.NDArray[Any]:
    """The array of a .npy file, not in memory yet: its header's size is checked against the file's first."""
    with open_file(path):
        pass
    found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object."""
    try:
        with open_file(path) as file:
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


def difference(stored: Any, given: Any, place: str = "") -> str | None:
    """The first value that is not the same, as a sentence's part.

    >>> difference({"a": {"b": 1}}, {"a": {"b": 2}})
    'a.b is 2 here and 1 there'
    """
    if isinstance(stored, dict) and isinstance(given, dict):
        keys = [*stored, *(key for key in given if key not in stored)]
        found = (difference(stored.get(k), given.get(k), f"{place}.{k}".lstrip(".")) for k in keys)
        return next((text for text in found if text is not None), None)
    if stored == given:
        return None
    return f"{place} is {json.dumps(given)} here and {json.dumps(stored)} there"

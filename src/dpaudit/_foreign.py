"""Reading what anybody may have written: nothing in it is run, and nothing is without an end."""

from __future__ import annotations

import errno
import json
import os
import stat
import tokenize
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from dpaudit.errors import InputError

__all__ = ["LARGEST_ARRAY", "NOT_AN_ARRAY", "map_array", "open_file", "read_json"]

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

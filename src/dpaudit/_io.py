"""Atomic writes under a lock, and reads of untrusted files.

Reading executes nothing, never blocks, and is bounded. :class:`JsonCache` stores finished pieces of work.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import tokenize
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from io import BufferedReader
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, BinaryIO, Final, NoReturn

import numpy as np
import numpy.typing as npt

from dpaudit._interrupts import is_about_input, note_folder, raise_if_machine
from dpaudit.errors import IncompleteError, InputError

ERROR_FILE: Final = "dpaudit-error.txt"  # the traceback of the last attempt, if it could not be completed
_LOCK: Final = ".lock"
_HELD: Final[dict[Path, BinaryIO]] = {}  # the locks of this process, by absolute directory
_UNFINISHED = ".unfinished"
# what numpy and its header parser raise for invalid bytes
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
LARGEST_ARRAY: Final = 2**32  # bytes in memory: a file of a few kilobytes can claim more than is available
_LARGEST_JSON = 50_000_000  # bytes


def expanded(path: str | Path) -> Path:
    """Return the path with ``~`` replaced by the home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path} names a home directory that does not exist.") from error


def followed(path: Path) -> Path:
    """Return the target of a path, so that the target is written and the link is kept.

    This is for paths given by the user. A file named by dpaudit may be a link created by another user: it is
    never followed.
    """
    with _writing(path):
        _require_replaceable(path, path.stat)
        return path.resolve()


def make_folder(path: Path) -> None:
    """Create the directory unless it exists."""
    if path.is_file():
        raise InputError(f"{path} is a file, not a directory.")
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def locked(folder: Path, *, is_resumed: bool = True) -> Iterator[None]:
    """Lock a directory against other processes; the lock is released when this process ends or is killed.

    ``is_resumed`` is whether the same command resumes the work in it after an interrupt.
    """
    make_folder(folder)
    with _lock_file(folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{folder} is in use by another process.") from error
        except OSError as error:
            raise IncompleteError(f"Cannot lock {folder}: {error.strerror or error}.") from error
        for path in (*folder.glob(f".*{_UNFINISHED}"), folder / ERROR_FILE):  # of an earlier process
            path.unlink(missing_ok=True)
        note_folder(folder, is_resumed=is_resumed)
        key = folder.absolute()
        _HELD[key] = file
        try:
            yield
        finally:
            _HELD.pop(key, None)


def require_lock(path: Path) -> None:
    """Raise if the lock of the directory of a file was removed: another process may work there by now."""
    place = path.absolute()
    for folder in (place, *place.parents):
        if (file := _HELD.get(folder)) is not None:
            _require_same(folder, file)


def _require_same(folder: Path, file: BinaryIO) -> None:
    try:
        if os.path.samestat((folder / _LOCK).lstat(), os.fstat(file.fileno())):
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        raise IncompleteError(f"Cannot read {folder / _LOCK}: {error.strerror or error}.") from error
    if not folder.exists():
        raise IncompleteError(f"The directory {folder} has vanished.")
    raise IncompleteError(
        f"The lock {folder / _LOCK} was removed or replaced, so that another process may work in {folder}."
    )


def _lock_file(folder: Path) -> BinaryIO:
    """Open the lock, an empty file; a link or pipe created by another user is not followed or waited for."""
    with _writing(folder):
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        return os.fdopen(handle, "r+b", buffering=0)


def remove(path: Path) -> None:
    """Delete the file if it exists."""
    with _writing(path):
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically."""
    write(path, lambda file: file.write(text.encode()), private=private)


def write(path: Path, fill: Callable[[BinaryIO], object], *, private: bool = False) -> None:
    """Write to a temporary file and rename it, so that no partial file is read, even after a power failure.

    Other users may read the file as far as the umask allows, and not at all if it is ``private``.
    """
    require_lock(path)
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


def append(path: Path, content: bytes) -> None:
    """Append to a file and wait until it is on disk; what cannot be written completely is cut off again."""
    require_lock(path)
    with _writing(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def _require_replaceable(path: Path, status: Callable[[], os.stat_result]) -> None:
    """Raise if the path is a pipe, device or socket, which writing would replace by a file."""
    try:
        mode = status().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path} is a pipe or a device, which cannot be replaced by a file.")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        require_lock(path)  # the directory may have vanished after the write began
        kind = InputError if is_about_input(error) else IncompleteError
        raise kind(f"Cannot write {path}: {error.strerror or error}.") from error
    except ValueError as error:
        if "\0" in str(path):
            raise InputError(f"{str(path)!r} is not a valid path.") from error
        raise


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise in a sentence if a file cannot be read."""
    try:
        yield
    except OSError as error:
        raise_if_machine(error, f"Cannot read {path}")
        if isinstance(error, IsADirectoryError):
            raise InputError(f"{path} is a directory, not a file.") from error
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading: a pipe would block until there is a writer, a device has no end."""
    # O_NONBLOCK affects only the opening of a pipe; the open file is checked, so that it cannot be swapped
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise InputError(f"{path} is a pipe or a device, not a file.")


def packaged(*names: str) -> str:
    """Return the text of a file that comes with dpaudit."""
    return resources.files("dpaudit").joinpath(*names).read_text("utf-8")


def map_array(path: Path) -> npt.NDArray[Any]:
    """Memory-map the array of a .npy file, after checking its size against that of the file."""
    with open_file(path):
        pass
    with warnings.catch_warnings(action="ignore"):  # about old and damaged headers
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def read_array(path: Path, kinds: str) -> npt.NDArray[Any] | None:
    """Return an array of one of these dtype kinds; None if there is no such file."""
    if not path.exists():
        return None
    try:
        mapped = map_array(path)
    except InputError:
        raise
    except (OSError, *NOT_AN_ARRAY) as error:
        if isinstance(error, OSError):  # numpy raises MemoryError for damaged headers, too
            raise_if_machine(error, f"Cannot read {path}")
        raise InputError(f"{path} does not contain an array, or is damaged.") from error
    if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in kinds:
        raise InputError(f"{path} does not contain numbers.")
    if mapped.nbytes > LARGEST_ARRAY:  # a sparse file may be larger than the disk
        raise InputError(
            f"{path} contains an array of {mapped.nbytes:,} bytes; at most {LARGEST_ARRAY:,} are read."
        )
    return np.array(mapped)


def stored(
    path: Path, pieces: Iterable[npt.NDArray[Any]], shape: tuple[int, ...] | None = None
) -> npt.NDArray[Any]:
    """Write the numbers from a packed file to a temporary file, piece by piece, and memory-map them."""
    with temporary(path) as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, np.float64).data)
            require_moderate(path, file.tell())
        if not file.tell():
            raise InputError(f"{path} contains no scores.")
        file.flush()
        return deleted_after_use(np.memmap(file.name, np.float64, "r", shape=shape), file.name)


@contextmanager
def temporary(path: Path) -> Iterator[IO[bytes]]:
    """Create a temporary file for the content of ``path``; it remains unless an exception is raised."""
    try:
        with NamedTemporaryFile(prefix="dpaudit-scores-", delete=False) as file:
            try:
                yield file
            except BaseException:
                Path(file.name).unlink()
                raise
    except OSError as error:
        raise_if_machine(error, f"Cannot unpack {path} to the directory of temporary files (TMPDIR)")
        raise


def deleted_after_use(mapped: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Return an array whose file is deleted when the array is, or at the end of the process."""
    weakref.finalize(mapped, Path(name).unlink, missing_ok=True)
    return mapped


def require_moderate(path: Path, size: int) -> None:
    """Raise if all arrays that are read from a packed file are too large, before they are unpacked."""
    if size > LARGEST_ARRAY:
        raise InputError(
            f"{path} contains arrays of {size:,} bytes in all; at most {LARGEST_ARRAY:,} are unpacked. A "
            ".npy file may have any size."
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        with open_file(path) as file:
            content = file.read(_LARGEST_JSON + 1)
        if len(content) > _LARGEST_JSON:
            raise InputError(f"{path} is larger than {_LARGEST_JSON:,} bytes.")  # noqa: TRY301
        values = json.loads(content.decode(), parse_constant=_refuse_constant)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} must contain a JSON object, got a {type(values).__name__}.")
    return values


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def differences(
    stored: Any,
    expected: Any,
    key: str = "",
    *,
    is_equal: Callable[[str, Any, Any], bool] = lambda _, value, other: bool(value == other),
) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, stored and expected value of the innermost differences; further stored keys are ignored."""
    if isinstance(stored, dict) and isinstance(expected, dict):
        for name, value in expected.items():
            yield from differences(stored.get(name), value, f"{key}.{name}".lstrip("."), is_equal=is_equal)
    elif isinstance(stored, list) and isinstance(expected, list) and len(stored) == len(expected):
        for index, (value, other) in enumerate(zip(stored, expected, strict=True)):
            yield from differences(value, other, f"{key}.{index}", is_equal=is_equal)
    elif not is_equal(key, stored, expected):
        yield key, stored, expected


def difference(stored: Any, requested: Any) -> str | None:
    """Return the first difference as part of a sentence; None if there is none.

    >>> difference({"a": {"b": 1}}, {"a": {"b": 2}})
    'a.b is 2 instead of the stored 1'
    """
    for key, value, other in differences(stored, requested):
        return f"{key} is {json.dumps(other)} instead of the stored {json.dumps(value)}"
    for key, other, value in differences(requested, stored):  # of keys that are only stored
        return f"{key} is {json.dumps(other)} instead of the stored {json.dumps(value)}"
    return None


class JsonCache:
    """Finished pieces of work in a directory: one JSON file per name, each complete or absent.

    Every file begins with the values of ``identity``, which describe how it was made. With ``keys``, it also
    contains these and no others. ``content`` describes a file in the error about a damaged one.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any] | None = None,
        *,
        keys: Collection[str] | None = None,
        content: str = "",
        indent: int = 2,
    ) -> None:
        self.folder, self.identity = folder, json.loads(json.dumps(identity or {}))
        self._keys, self._content, self._indent = keys, content, indent

    def path(self, name: str) -> Path:
        """Return the file of a piece of work."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a finished piece without its identity, None if it is missing; raise if it is foreign."""
        path = self.path(name)
        if not path.exists():
            return None
        try:
            values = read_json(path)
        except InputError as error:
            raise self._damaged(path) if self._content else error from error
        for key, expected in self.identity.items():
            stored = values.pop(key, None)
            if (other := difference({key: stored}, {key: expected})) is not None:
                raise InputError(f"{path} was made otherwise: {other}; choose another --output.")
        if self._keys is not None and values.keys() != set(self._keys):
            raise self._damaged(path)
        return values

    def write(self, name: str, values: Mapping[str, Any], *, private: bool = False) -> None:
        """Store a finished piece."""
        text = json.dumps({**self.identity, **values}, indent=self._indent, allow_nan=False)
        write_text(self.path(name), text + "\n", private=private)

    def _damaged(self, path: Path) -> InputError:
        return InputError(f"{path} is damaged: it does not contain {self._content}. Delete it.")

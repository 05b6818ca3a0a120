"""Scores from .npy and .npz files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit._foreign import NOT_AN_ARRAY, map_array, open_file
from dpaudit.cli._sizes import require_moderate
from dpaudit.errors import InputError

__all__ = ["Archive", "open_npz", "read_npy"]

_NPY, _ZIP = b"\x93NUMPY", b"PK"
# also what unpackers say
_DAMAGED = *NOT_AN_ARRAY, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error


def read_npy(path: Path) -> npt.NDArray[Any]:
    """The array, memory-mapped: it may be larger than the memory."""
    with _whole(path, _NPY, "a .npy file"):
        return map_array(path)


class Archive:
    """The arrays of an open .npz file, each read when it is asked for."""

    def __init__(self, path: Path, arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self._path, self._arrays, self._sizes = path, arrays, sizes
        self.names = list(arrays)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        require_moderate(self._path, self._sizes.get(f"{name}.npy", 0))
        array = self._arrays[name]
        if not isinstance(array, np.ndarray) or array.dtype.itemsize == 0:
            raise InputError(f"Expected {name!r} in {self._path} to be an array, got something else.")
        return array


@contextmanager
def open_npz(path: Path) -> Iterator[Archive]:
    """The arrays by their names."""
    # opened here, because numpy leaves a damaged file open
    with (
        _whole(path, _ZIP, "an .npz file"),
        open_file(path) as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        yield Archive(path, arrays, {one.filename: one.file_size for one in arrays.zip.infolist()})


@contextmanager
def _whole(path: Path, start: bytes, kind: str) -> Iterator[None]:
    """Turn what numpy says of a file into a sentence."""
    with open_file(path) as file:
        if file.read(len(start)) != start:
            raise InputError(f"Expected {kind}, but {path} is not one, whatever its name.")
    try:
        yield
    except InputError:
        raise
    except _DAMAGED as error:
        if "object" in str(error).lower():
            raise InputError(
                f"Expected numbers in {path}, got pickled Python objects, which are not read."
            ) from error
        raise InputError(f"Expected the whole of {kind}, but {path} is cut off or damaged.") from error

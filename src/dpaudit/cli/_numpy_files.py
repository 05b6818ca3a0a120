"""Scores from .npy and .npz files."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit.errors import InputError

__all__ = ["read_npy", "read_npz"]

_NPY, _ZIP = b"\x93NUMPY", b"PK"


def read_npy(path: Path) -> npt.NDArray[Any]:
    """The array, memory-mapped: it may be larger than the memory."""
    with _whole(path, _NPY, "a .npy file"):
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays by their names."""
    # opened here, because numpy leaves a damaged file open
    with (
        _whole(path, _ZIP, "an .npz file"),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return dict(arrays)


@contextmanager
def _whole(path: Path, start: bytes, kind: str) -> Iterator[None]:
    """Turn what numpy says of a file into a sentence."""
    with path.open("rb") as file:
        if file.read(len(start)) != start:
            raise InputError(f"Expected {kind}, but {path} is not one, whatever its name.")
    try:
        yield
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        if "object" in str(error).lower():
            raise InputError(
                f"Expected numbers in {path}, got pickled Python objects, which are not read."
            ) from error
        raise InputError(f"Expected the whole of {kind}, but {path} is cut off or damaged.") from error

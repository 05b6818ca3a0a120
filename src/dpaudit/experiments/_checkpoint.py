"""The state of a training on disk, whole or not at all."""

from __future__ import annotations

import math
import pickle  # only its error: nothing here unpickles
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from dpaudit import _files
from dpaudit._foreign import open_file
from dpaudit.errors import InputError
from dpaudit.training import Training

__all__ = ["restore", "save"]

_ARRAY = "numpy array"  # the mark of an array among tensors
# what torch says of bytes that are no checkpoint, and a training of a state that is not its own
_DAMAGED = (
    AssertionError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OSError,
    OverflowError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)


def save(path: Path, training: Training, seconds: float) -> None:
    """Write the state beside the last one, then put it in its place. Seeds and coins follow from it."""
    state = _as_tensors({"training": training.state_dict(), "seconds": seconds})
    _files.write(path, lambda file: torch.save(state, file), private=True)


def restore(path: Path, training: Training) -> float:
    """Put an equal training where the saved one was; returns the seconds that it had taken."""
    try:
        with open_file(path) as file:
            _require_whole(file)
            # tensors, numbers and words only: reading the file runs nothing that is in it
            state = _as_arrays(torch.load(file, weights_only=True, map_location="cpu"))
        training.load_state_dict(state["training"])
        _require(math.isfinite(state["seconds"]))
        return float(state["seconds"])
    except _DAMAGED as error:
        raise InputError(
            f"Expected a whole checkpoint in {path}, but it is damaged; delete it to repeat the run from "
            "its first step, with the same seeds."
        ) from error


def _require_whole(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as packed:
        # torch packs nothing: what unpacks to more than the file has bytes is not of it
        _require(all(one.compress_type == zipfile.ZIP_STORED for one in packed.infolist()))
        _require(packed.testzip() is None)  # torch itself does not look at the checksums
    file.seek(0)


def _require(whole: bool) -> None:
    if not whole:
        raise zipfile.BadZipFile


def _as_tensors(value: Any) -> Any:
    """Arrays as marked tensors, which is what may be in such a file."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, Mapping):
        return {key: _as_tensors(one) for key, one in value.items()}
    return [_as_tensors(one) for one in value] if isinstance(value, list) else value


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return value[_ARRAY].numpy()
        return {key: _as_arrays(one) for key, one in value.items()}
    return [_as_arrays(one) for one in value] if isinstance(value, list) else value

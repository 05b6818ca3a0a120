"""The directory of one run: config, versions, checkpoint, observations and result.

``save`` and ``restore`` write and read the checkpoint of a training run.
"""

from __future__ import annotations

import math
import pickle  # only for its exception: nothing is unpickled here
import platform
import struct
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

import dpaudit
from dpaudit import _io
from dpaudit._faults import raise_if_machine
from dpaudit._io import JsonCache, difference, open_file
from dpaudit.errors import InputError
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.config import Config
from dpaudit.stats._serialization import SCHEMA_VERSION, upgraded
from dpaudit.training import Training

_ARRAY = "numpy array"  # key that marks a tensor as a converted array
# raised by torch for bytes that are not a checkpoint, and by a training run for a state that does not fit
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


class RunDirectory:
    """Files of one run, each of which is either complete or missing."""

    def __init__(self, path: str | Path) -> None:
        self.path = _io.expanded(path)
        self.checkpoint = self.path / "checkpoint.pt"
        self._json = JsonCache(self.path)  # the identity is stored separately, as the config

    def locked(self) -> AbstractContextManager[None]:
        """Lock the directory against other processes."""
        return _io.locked(self.path)

    def resolved(self, config: Config) -> Resolved | None:
        """Return the values that the run started with; None for a new run. Raise if the config differs."""
        stored = self._json.read("config")
        if stored is None:
            self._require_no_other()
            return None
        found = difference(stored.get("config"), config.identity())
        if found is not None:
            raise InputError(
                f"Expected the config of the run in {self.path}, but {found}; choose another output "
                "directory."
            )
        return Resolved.from_dict(stored.get("resolved"), str(self._json.path("config")))

    def begin(self, config: Config, resolved: Resolved) -> None:
        """Write the config and the versions before the first step."""
        self._json.write("versions", _versions())
        values = {"config": config.identity(), "resolved": resolved.to_dict()}
        # private: it contains the seeds
        self._json.write("config", {"schema_version": SCHEMA_VERSION, **values}, private=True)

    def result(self) -> dict[str, Any] | None:
        """Return the result of the run; None if it is not finished."""
        values = self._json.read("result")
        return None if values is None else upgraded(values)

    def finish(self, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]) -> None:
        """Write the observations first and the result last: a directory with a result is complete."""
        for name, array in arrays.items():
            _io.write(self.path / f"{name}.npy", lambda file, array=array: np.save(file, array))  # type: ignore[misc]
        self._json.write("result", result)

    def replace(
        self, config: Config, resolved: Resolved, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]
    ) -> None:
        """Replace another run with a finished one; the old result is removed first."""
        with self.locked():
            _io.remove(self._json.path("result"))
            self.begin(config, resolved)
            self.finish(arrays, result)

    def _require_no_other(self) -> None:
        for path in (self._json.path("result"), self.checkpoint):
            if path.exists():
                raise InputError(
                    f"Expected an empty directory or that of a run, but there is {path.name} without a "
                    f"config.json in {self.path}; choose another output directory."
                )


def _versions() -> dict[str, str]:
    """Return the versions of the software on which the numbers depend."""
    return {
        "dpaudit": dpaudit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def save(path: Path, training: Training, seconds: float) -> None:
    """Write a checkpoint, with private permissions: it reveals seeds and canary membership."""
    state = _as_tensors({"training": training.state_dict(), "seconds": seconds})
    _io.write(path, lambda file: torch.save(state, file), private=True)


def restore(path: Path, training: Training) -> float:
    """Restore the state of a training run; return the seconds that it had taken."""
    try:
        with open_file(path) as file:
            _require_undamaged(file)
            state = _as_arrays(_loaded(file))
        training.load_state_dict(state["training"])
        _require(math.isfinite(state["seconds"]))
        return float(state["seconds"])
    except _DAMAGED as error:
        raise_if_machine(error, f"Cannot read {path}")  # deleting an intact checkpoint would lose it
        raise InputError(
            f"Expected an intact checkpoint in {path}, but it is damaged; delete it to restart the run from "
            "its first step with the same seeds."
        ) from error


def _require_undamaged(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as packed:
        # torch does not compress: an entry that decompresses to more than its size is not from torch
        _require(all(one.compress_type == zipfile.ZIP_STORED for one in packed.infolist()))
        _require(packed.testzip() is None)  # torch itself does not verify the checksums
    file.seek(0)


def _require(ok: bool) -> None:
    if not ok:
        raise zipfile.BadZipFile


def _loaded(file: BinaryIO) -> Any:
    """Load tensors, numbers and strings only: no code from the file is executed."""
    with warnings.catch_warnings():
        # torch warns about an unusual pickle protocol; what can be loaded is validated anyway
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(file, weights_only=True, map_location="cpu")


def _as_tensors(value: Any) -> Any:
    """Convert arrays to marked tensors, which ``torch.load`` accepts with ``weights_only``."""
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

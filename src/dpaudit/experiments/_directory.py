"""The directory of one run: what it holds, and who may write to it.

The state of a training on disk, whole or not at all. What a run was made with.
"""

from __future__ import annotations

import json
import math
import pickle  # only its error: nothing here unpickles
import platform
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

import dpaudit
from dpaudit import _io
from dpaudit._io import difference, open_file, read_json
from dpaudit.errors import InputError
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.config import Config
from dpaudit.stats._serialization import SCHEMA_VERSION, upgraded
from dpaudit.training import Training


def versions() -> dict[str, str]:
    """Of everything that its numbers depend on."""
    return {
        "dpaudit": dpaudit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


class RunDirectory:
    """Config, versions, checkpoint, observations and result of one run; each file is whole or not there."""

    def __init__(self, path: str | Path) -> None:
        self.path = _io.expanded(path)
        self.checkpoint = self.path / "checkpoint.pt"
        self._config = self.path / "config.json"
        self._versions = self.path / "versions.json"
        self._result = self.path / "result.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else runs here meanwhile."""
        with _io.locked(self.path):
            yield

    def resolved(self, config: Config) -> Resolved | None:
        """What was decided when the run began; None if there is none yet, refused if it is another's."""
        if not self._config.exists():
            self._require_no_other()
            return None
        stored = read_json(self._config)
        found = difference(stored.get("config"), config.identity())
        if found is not None:
            raise InputError(
                f"Expected the config of the run that is in {self.path}, but {found}; give another output."
            )
        return Resolved.from_dict(stored.get("resolved"), str(self._config))

    def begin(self, config: Config, resolved: Resolved) -> None:
        """Keep what the run is, before its first step."""
        self._write_json(self._versions, versions())
        values = {"config": config.identity(), "resolved": resolved.to_dict()}
        # with the seeds, which nobody needs who only looks at the result
        self._write_json(self._config, {"schema_version": SCHEMA_VERSION, **values}, private=True)

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run."""
        return upgraded(read_json(self._result)) if self._result.exists() else None

    def finish(self, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]) -> None:
        """Keep observations and then the result: where it is, all is."""
        for name, array in arrays.items():
            _io.write(self.path / f"{name}.npy", lambda file, array=array: np.save(file, array))  # type: ignore[misc]
        self._write_json(self._result, result)

    def replace(
        self, config: Config, resolved: Resolved, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]
    ) -> None:
        """Keep a whole run at once, where another one may have been: its result is gone first."""
        with self.locked():
            _io.remove(self._result)
            self.begin(config, resolved)
            self.finish(arrays, result)

    def _write_json(self, path: Path, values: Mapping[str, Any], *, private: bool = False) -> None:
        _io.write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n", private=private)

    def _require_no_other(self) -> None:
        for path in (self._result, self.checkpoint):
            if path.exists():
                raise InputError(f"Expected a new directory or one of a run, but {path} is not of a run.")


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
    _io.write(path, lambda file: torch.save(state, file), private=True)


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

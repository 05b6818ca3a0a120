"""The directory of one run: config, provenance, checkpoint, observations, result and seal.

``save`` and ``restore`` write and read the checkpoint of a training run.
"""

from __future__ import annotations

import math
import os
import pickle  # only for its exception: nothing is unpickled here
import struct
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch

from dpaudit import _io, _provenance
from dpaudit._interrupts import raise_if_machine
from dpaudit._io import JsonCache, difference, open_file, read_json
from dpaudit.errors import InputError
from dpaudit.experiments._analysis import RESULT_SCHEMA, SCORES_OF_MODES
from dpaudit.experiments._recompute import Verified, verify_finished
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments._seal import (
    MANIFEST,
    RUN_FILES,
    STORE_FILES,
    HashingWriter,
    require_checksum,
    require_digest,
    require_files,
    seal,
    unseal,
    with_checksum,
)
from dpaudit.experiments.config import Config
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
            if (name := self._other_file("provenance.json")) is not None:  # that is written first
                raise InputError(
                    f"Expected an empty directory or that of a run, but there is {name} without a "
                    f"config.json in {self.path}; remove it or choose another output directory."
                )
            return None
        stored = require_checksum(self._json.path("config"), stored)
        changed = difference(stored.get("config"), config.identity())
        if changed is not None:
            raise InputError(
                f"Expected the config of the run in {self.path}, but {changed}; choose another output "
                "directory."
            )
        return Resolved.from_dict(stored.get("resolved"), str(self._json.path("config")))

    def require_own_files(self, config: Config) -> None:
        """Raise if there is a file that a run of this mode does not write, since it would be sealed."""
        mode = config.audit.mode
        progress = ("canary.json", *STORE_FILES) if mode == "many-runs" else (self.checkpoint.name,)
        arrays = (f"{name}.npy" for name in SCORES_OF_MODES[mode])
        written = "config.json", "provenance.json", "result.json", f"{MANIFEST}.json"
        if (name := self._other_file(*written, *progress, *arrays)) is not None:
            raise InputError(
                f"Expected only files of this run in {self.path}, but there is {name}, which a run of mode "
                f"{mode} does not write; remove it or choose another output directory."
            )

    def start(self, config: Config, resolved: Resolved) -> None:
        """Write the provenance and the config of a new run before its first step."""
        self.note_start(is_new=True)
        values = {"config": config.identity(), "resolved": resolved.to_dict()}
        # private: it contains the seeds
        self._json.write("config", with_checksum({"schema_version": RESULT_SCHEMA, **values}), private=True)

    def note_start(self, *, is_new: bool = False) -> None:
        """Remove the seal and the result of an earlier end, and add this process to the provenance."""
        require_files(self.path)
        unseal(self.path)
        _io.remove(self._json.path("result"))
        starts = _provenance.with_start(self._starts(), is_new=is_new)
        self._json.write("provenance", with_checksum({"starts": starts}))

    def seal_digest(self) -> str:
        """Return the digest of the manifest that this process has written."""
        return str(read_json(self._json.path(MANIFEST))["seal"])

    def _starts(self) -> list[Any]:
        stored = self._json.read("provenance")
        if stored is None:
            return []
        return list(require_checksum(self._json.path("provenance"), stored, "delete it").get("starts", []))

    def result(self) -> Verified | None:
        """Return the result of a finished run, checked and derived again; None if the run is not finished."""
        return verify_finished(self.path) if self._json.path("result").exists() else None

    def finish(
        self,
        config: Config,
        resolved: Resolved,
        arrays: Mapping[str, np.ndarray],
        result: Mapping[str, Any],
        *,
        packages: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Write the observations, then the result with its provenance, and seal them; return the result.

        ``packages`` are those that other processes of the run have imported.
        """
        for name, array in arrays.items():
            _io.write(self.path / f"{name}.npy", lambda file, array=array: np.save(file, array))  # type: ignore[misc]
        provenance = _provenance.of_run(self._starts(), resolved.digests(config), packages)
        # decides by which methods the numbers are derived again, without the config, which holds the seeds
        values = {**result, "audit": config.identity()["audit"], "provenance": provenance}
        self._json.write("result", values)
        seal(self.path)
        return values

    def replace(
        self, config: Config, resolved: Resolved, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Replace another run with a finished one; its files are removed first, the seal before others."""
        with _io.locked(self.path, is_resumed=False):
            unseal(self.path)
            for name in reversed(RUN_FILES):  # the config, by which the run is recognized, is the last
                _io.remove(self.path / name)
            self.start(config, resolved)
            return self.finish(config, resolved, arrays, result)

    def _other_file(self, *own: str) -> str | None:
        """Return a file that has the name of one of a run, but is none of these; None if there is none."""
        others = (name for name in (*RUN_FILES, f"{MANIFEST}.json") if name not in own)
        return next((name for name in others if os.path.lexists(self.path / name)), None)


def run_digest(config: Config, resolved: Resolved) -> str:
    """Return the digest by which a checkpoint knows its run: of the config, the data and the seeds."""
    return _provenance.digest([config.identity(), resolved.to_dict()])


def save(path: Path, training: Training, seconds: float, run: str) -> None:
    """Write a checkpoint, with private permissions: it reveals seeds and canary membership."""
    state = _as_tensors({"training": training.state_dict(), "seconds": seconds, "run": run})

    def fill(raw: BinaryIO) -> None:
        file = HashingWriter(raw)
        torch.save(state, file)  # type: ignore[arg-type]  # all that torch needs of a file
        file.finish()

    _io.write(path, fill, private=True)


def restore(path: Path, training: Training, run: str) -> float:
    """Restore the state of a training run; return the seconds that it had taken. ``run`` is its digest."""
    try:
        with open_file(path) as file:
            require_digest(file)
            _require_undamaged(file)
            state = _as_arrays(_loaded(file))
        if state["run"] != run:
            raise InputError(  # noqa: TRY301
                f"Expected a checkpoint of this run in {path}, got that of another run; restore it, or "
                "delete it to restart the run from its first step with the same seeds."
            )
        training.load_state_dict(state["training"])
        _require(math.isfinite(state["seconds"]))
        return float(state["seconds"])
    except InputError as error:
        if str(path) in str(error):
            raise
        raise _damaged(path) from error
    except _DAMAGED as error:
        raise_if_machine(error, f"Cannot read {path}")  # deleting an intact checkpoint would lose it
        raise _damaged(path) from error


def _damaged(path: Path) -> InputError:
    return InputError(
        f"Expected an intact checkpoint in {path}, but it is damaged; delete it to restart the run from "
        "its first step with the same seeds."
    )


def _require_undamaged(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as packed:
        # torch does not compress: an entry that decompresses to more than its size is not from torch
        _require(all(entry.compress_type == zipfile.ZIP_STORED for entry in packed.infolist()))
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
        return {key: _as_tensors(item) for key, item in value.items()}
    return [_as_tensors(item) for item in value] if isinstance(value, list) else value


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return value[_ARRAY].numpy()
        return {key: _as_arrays(item) for key, item in value.items()}
    return [_as_arrays(item) for item in value] if isinstance(value, list) else value

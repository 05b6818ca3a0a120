"""The directory of one run: what it holds, and who may write to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dpaudit import _files
from dpaudit._foreign import read_json
from dpaudit.errors import InputError
from dpaudit.experiments._difference import difference
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments._versions import versions
from dpaudit.experiments.config import Config

__all__ = ["SCHEMA_VERSION", "RunDirectory"]

SCHEMA_VERSION = 1


class RunDirectory:
    """Config, versions, checkpoint, observations and result of one run; each file is whole or not there."""

    def __init__(self, path: str | Path) -> None:
        self.path = _files.expanded(path)
        self.checkpoint = self.path / "checkpoint.pt"
        self._config = self.path / "config.json"
        self._versions = self.path / "versions.json"
        self._result = self.path / "result.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else runs here meanwhile."""
        with _files.locked(self.path):
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
        return read_json(self._result) if self._result.exists() else None

    def finish(self, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]) -> None:
        """Keep observations and then the result: where it is, all is."""
        for name, array in arrays.items():
            _files.write(self.path / f"{name}.npy", lambda file, array=array: np.save(file, array))  # type: ignore[misc]
        self._write_json(self._result, result)

    def replace(
        self, config: Config, resolved: Resolved, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]
    ) -> None:
        """Keep a whole run at once, where another one may have been: its result is gone first."""
        with self.locked():
            _files.remove(self._result)
            self.begin(config, resolved)
            self.finish(arrays, result)

    def _write_json(self, path: Path, values: Mapping[str, Any], *, private: bool = False) -> None:
        _files.write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n", private=private)

    def _require_no_other(self) -> None:
        for path in (self._result, self.checkpoint):
            if path.exists():
                raise InputError(f"Expected a new directory or one of a run, but {path} is not of a run.")

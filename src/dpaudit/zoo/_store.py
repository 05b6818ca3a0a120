"""The directory of a zoo: a file for each finished entry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from dpaudit import _files
from dpaudit.errors import InputError

__all__ = ["Store"]


class Store:
    """Each file is whole or not there, and says by which seed it was made."""

    schema_version: ClassVar[int] = 1

    def __init__(self, path: Path, *, seed: int, confidence: float) -> None:
        self._path = path.expanduser()
        self._identity = {"schema_version": self.schema_version, "seed": seed, "confidence": confidence}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else runs here meanwhile."""
        with _files.locked(self._path):
            yield

    def read(self, name: str) -> dict[str, Any] | None:
        """A finished entry; None if it is not, refused if it is of another run."""
        path = self._file(name)
        if not path.exists():
            return None
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            made = {key: values.pop(key) for key in self._identity}
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"Expected an entry of the zoo in {path}, but it cannot be read.") from error
        for key, value in self._identity.items():
            if made[key] != value:
                raise InputError(
                    f"Expected {key} = {value} in {path}, got {made[key]}; give another --output."
                )
        return values

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep a finished entry."""
        text = json.dumps({**self._identity, **values}, indent=2, allow_nan=False)
        _files.write_text(self._file(name), text + "\n")

    def _file(self, name: str) -> Path:
        return self._path / f"{name}.json"

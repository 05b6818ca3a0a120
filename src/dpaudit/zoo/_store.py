"""The directory of a zoo: a file for each finished entry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import dpaudit
from dpaudit import _files
from dpaudit._foreign import read_json
from dpaudit.errors import InputError

__all__ = ["Store"]

_KEYS = {"name", "public", "wrong", "kind", "not_caught", "left_out", "is_as_expected", "broken", "correct"}


class Store:
    """Each file is whole or not there, and says by which seed and with which versions it was made."""

    schema_version: ClassVar[int] = 2

    def __init__(self, path: Path, *, seed: int, confidence: float, twin_confidence: float) -> None:
        self._path = _files.expanded(path)
        self.identity: dict[str, Any] = {
            "schema_version": self.schema_version,
            "seed": seed,
            "confidence": confidence,
            "twin_confidence": twin_confidence,
            **{f"{name}_version": _version(name) for name in ("dpaudit", "torch", "opacus")},
        }

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
        values = _read(path)
        for key, value in self.identity.items():
            if (made := values.pop(key, None)) != value:
                raise InputError(f"Expected {key} = {value} in {path}, got {made}; give another --output.")
        if set(values) != _KEYS:
            raise _damaged(path)
        return values

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep a finished entry."""
        text = json.dumps({**self.identity, **values}, indent=2, allow_nan=False)
        _files.write_text(self._file(name), text + "\n")

    def _file(self, name: str) -> Path:
        return self._path / f"{name}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except InputError as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> InputError:
    return InputError(f"Expected an entry of the zoo in {path}, but it cannot be read; delete it.")


def _version(name: str) -> str | None:
    """Of dpaudit that of the code that runs, which may be newer than what was installed."""
    if name == "dpaudit":
        return dpaudit.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

"""Finished cells on disk, each whole or not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpaudit import _files
from dpaudit._foreign import read_json
from dpaudit.errors import InputError
from dpaudit.experiments._difference import difference
from dpaudit.experiments.reproduction._values import Key, Row

__all__ = ["Cells"]


class Cells:
    """The folder of a figure's cells. Each file says what it was made with: others are refused."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._folder, self._identity = folder, json.loads(json.dumps(identity))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else works on this figure here meanwhile."""
        with _files.locked(self._folder):
            yield

    def read(self, key: Key) -> tuple[list[Row], float] | None:
        """The rows of a finished cell and the seconds that it took; None if it is not."""
        path = self._file(key)
        if not path.exists():
            return None
        values = _read(path)
        other = difference(values["identity"], self._identity)
        if other is not None:
            raise InputError(
                f"Expected cells of this reproduction in {self._folder}, got those of another: {other}; "
                "give another --output."
            )
        return values["rows"], float(values["seconds"])

    def write(self, key: Key, rows: list[Row], seconds: float) -> None:
        """Keep a finished cell."""
        values = {"identity": self._identity, "key": key, "seconds": seconds, "rows": rows}
        _files.write_text(self._file(key), json.dumps(values, indent=1, allow_nan=False) + "\n")

    def place(self, key: Key) -> Path:
        """A folder for what the cell itself keeps."""
        return self._folder / _slug(key)

    def _file(self, key: Key) -> Path:
        return self._folder / f"{_slug(key)}.json"


def _slug(key: Key) -> str:
    """A name for files.

    >>> _slug({"epsilon": 1.0, "method": "f-DP (CP)"})
    'epsilon=1.0,method=f-DP-CP'
    """
    return ",".join(f"{name}={re.sub(r'[^A-Za-z0-9.]+', '-', str(key[name])).strip('-')}" for name in key)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
        if {"identity", "rows", "seconds"} <= values.keys():
            return values
    except InputError:
        pass
    raise InputError(f"Expected a cell of a reproduction in {path}, but it cannot be read; delete it.")

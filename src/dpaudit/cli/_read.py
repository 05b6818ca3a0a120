"""From files to observations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dpaudit.cli import _csv_files, _parquet_files
from dpaudit.cli._columns import Columns, as_presence
from dpaudit.cli._numpy_files import Archive, open_npz, read_npy
from dpaudit.cli._paths import readable, reading
from dpaudit.cli._sizes import listed
from dpaudit.errors import InputError
from dpaudit.stats import Observations

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """Where the scores are: a table, or a file for each side."""

    table: Path | None
    with_canary: Path | None
    without_canary: Path | None
    columns: Columns

    def read(self, *, normalized: bool) -> Observations:
        """The observations; .npy files stay on disk."""
        both = self.with_canary, self.without_canary
        if self.table is not None and both == (None, None):
            return _read_table(self.table, self.columns, normalized)
        if self.table is None and self.with_canary is not None and self.without_canary is not None:
            present = _read_side(self.with_canary, self.columns)
            absent = _read_side(self.without_canary, self.columns)
            return Observations(with_canary=present, without_canary=absent, normalized=normalized)
        raise InputError(f"Expected either a TABLE or both --with and --without, got {self._given()}.")

    def _given(self) -> str:
        named = (("TABLE", self.table), ("--with", self.with_canary), ("--without", self.without_canary))
        return " and ".join(name for name, path in named if path is not None) or "neither"


def _read_side(path: Path, columns: Columns) -> npt.NDArray[Any]:
    suffix = readable(path)
    with reading(path):
        if suffix == ".npy":
            return read_npy(path)
        if suffix == ".npz":
            with open_npz(path) as arrays:
                return arrays[columns.side(path, arrays.names)]
        if suffix == ".csv":
            return _csv_files.read_side(path, columns)
        return _parquet_files.read_side(path, columns)


def _read_table(path: Path, columns: Columns, normalized: bool) -> Observations:
    suffix = readable(path)
    with reading(path):
        if suffix == ".npy":
            raise InputError(f"Expected a .csv, .parquet or .npz table, or --with and --without, got {path}.")
        if suffix == ".npz":
            with open_npz(path) as arrays:
                return _from_npz(path, arrays, columns, normalized)
        module = _csv_files if suffix == ".csv" else _parquet_files
        scores, present = module.read_table(path, columns)
    return Observations.from_presence(scores, present, normalized=normalized)


def _from_npz(path: Path, arrays: Archive, columns: Columns, normalized: bool) -> Observations:
    if {"with_canary", "without_canary"} <= set(arrays.names):
        sides = {name: arrays[name] for name in ("with_canary", "without_canary")}
        return Observations(**sides, normalized=normalized)
    if not {columns.score, columns.presence} <= set(arrays.names):
        raise InputError(
            f"Expected arrays 'with_canary' and 'without_canary', or {columns.score!r} and "
            f"{columns.presence!r}, in {path}, got {listed(arrays.names)}."
        )
    present = as_presence(path, columns.presence, arrays[columns.presence])
    return Observations.from_presence(arrays[columns.score], present, normalized=normalized)

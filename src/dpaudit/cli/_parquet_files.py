"""Scores from .parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dpaudit.cli._columns import Columns, as_presence
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.stats._types import BoolArray

__all__ = ["read_side", "read_table"]


def read_side(path: Path, columns: Columns) -> npt.NDArray[Any]:
    """The scores of one side: the only column, or the named one."""
    file = _open(path)
    return _arrays(path, file, [columns.side(path, file.schema_arrow.names)])[0]


def read_table(path: Path, columns: Columns) -> tuple[npt.NDArray[Any], BoolArray]:
    """Scores and presence."""
    file = _open(path)
    names = columns.table(path, file.schema_arrow.names)
    scores, presence = _arrays(path, file, names)
    return scores, as_presence(path, names[1], presence)


def _open(path: Path) -> Any:
    try:
        import pyarrow  # noqa: PLC0415  # an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("Reading .parquet files", "parquet") from error
    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise InputError(f"Expected a whole .parquet file, but {path} is cut off or damaged.") from error


def _arrays(path: Path, file: Any, names: Sequence[str]) -> list[npt.NDArray[Any]]:
    table = file.read(columns=list(names))
    for name in names:
        if empty := table.column(name).null_count:
            raise InputError(f"Expected a value in every row of {name!r} of {path}, got {empty} without.")
    return [table.column(name).to_numpy() for name in names]

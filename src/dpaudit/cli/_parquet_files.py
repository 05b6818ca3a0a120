"""Scores from .parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit._foreign import open_file
from dpaudit.cli._columns import Columns, as_presence
from dpaudit.cli._sizes import require_moderate
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.stats._types import BoolArray

__all__ = ["read_side", "read_table"]

_WIDEST = 8  # bytes of a score in memory


def read_side(path: Path, columns: Columns) -> npt.NDArray[Any]:
    """The scores of one side: the only column, or the named one."""
    with _opened(path) as file:
        return _numbers(path, file, columns.side(path, file.schema_arrow.names))


def read_table(path: Path, columns: Columns) -> tuple[npt.NDArray[Any], BoolArray]:
    """Scores and presence."""
    with _opened(path) as file:
        score, presence = columns.table(path, file.schema_arrow.names)
    with _opened(path, words=[presence]) as file:
        scores = _numbers(path, file, score)
        return scores, as_presence(path, presence, _words_or_numbers(path, file, presence))


@contextmanager
def _opened(path: Path, words: Sequence[str] = ()) -> Iterator[Any]:
    """The file; a text in the columns ``words`` is kept once, however many rows have it."""
    try:
        import pyarrow  # noqa: PLC0415  # an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("Reading .parquet files", "parquet") from error
    damaged = pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError
    with open_file(path):  # what the system says of it is no damage
        pass
    try:
        with parquet.ParquetFile(path, read_dictionary=list(words)) as file:
            yield file
    except InputError:
        raise
    except damaged as error:
        raise InputError(f"Expected a whole .parquet file, but {path} is cut off or damaged.") from error


def _numbers(path: Path, file: Any, name: str) -> npt.NDArray[Any]:
    from pyarrow import types  # noqa: PLC0415

    kind = _kind(path, file, name)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise InputError(f"Expected numbers in {name!r} of {path}, got a column of type {kind}.")
    found: npt.NDArray[Any] = _column(path, file, name).to_numpy()
    return found


def _words_or_numbers(path: Path, file: Any, name: str) -> npt.NDArray[Any]:
    from pyarrow import types  # noqa: PLC0415

    if not types.is_dictionary(_kind(path, file, name)):
        return _numbers(path, file, name)
    chunks = _column(path, file, name).chunks
    words = [np.array(chunk.dictionary.to_pylist(), dtype=object) for chunk in chunks]
    return np.concatenate([w[c.indices.to_numpy()] for w, c in zip(words, chunks, strict=True)])


def _kind(path: Path, file: Any, name: str) -> Any:
    names: Sequence[str] = file.schema_arrow.names
    if names.count(name) > 1:
        raise InputError(f"Expected one column {name!r} in {path}, got {names.count(name)}.")
    return file.schema_arrow.field(name).type


def _column(path: Path, file: Any, name: str) -> Any:
    require_moderate(path, file.metadata.num_rows * _WIDEST)
    column = file.read(columns=[name]).column(name)
    if empty := column.null_count:
        raise InputError(f"Expected a value in every row of {name!r} of {path}, got {empty} without.")
    return column

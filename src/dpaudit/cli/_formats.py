"""Score files: .csv, .npy, .npz and .parquet, read in bounded memory.

:func:`readable` checks a file by its name, :class:`Columns` names the columns to read. Each format is read as
the scores of one side, or as a table of scores and presence. Scores of packed formats are written to a
temporary file, piece by piece, and memory-mapped like those of a .npy file. A file that is damaged, or too
large to unpack, raises an error that quotes little of it.
"""

from __future__ import annotations

import csv
import lzma
import math
import shutil
import struct
import zipfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np
import numpy.typing as npt

from dpaudit._interrupts import raise_if_machine
from dpaudit._io import (
    NOT_AN_ARRAY,
    deleted_after_use,
    map_array,
    open_file,
    require_moderate,
    stored,
    temporary,
)
from dpaudit._types import BoolArray, FloatArray
from dpaudit.errors import InputError, MissingExtraError

_EXPECTED = "a .npy, .npz, .csv or .parquet file"
_PRESENCE = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}
_LONGEST_WORD = 60  # characters of a quoted value
_MOST_NAMES = 10  # quoted in one message
_LONGEST_LINE = 1_000_000  # characters
_MOST_LINES = 1_000  # lines per row, whose cells may span several
_NPY, _ZIP = b"\x93NUMPY", b"PK"
# what zipfile and its decompressors raise for damaged files
_DAMAGED = *NOT_AN_ARRAY, KeyError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError
_WIDEST_SCORE, _WIDEST_CHARACTER = 8, 4  # bytes
_PARQUET_ROWS = 1 << 16  # that are decoded at a time
PIECE = 1 << 18  # scores that are unpacked at a time, and the most that are then kept in memory

_Row: TypeAlias = tuple[int, list[str]]


def readable(path: Path) -> str:
    """Return the suffix of an existing file that may hold scores."""
    with reading(path):
        if path.is_dir():
            raise InputError(f"Expected {_EXPECTED}, got the directory {path}.")
        path.stat()
        if not path.is_file():  # opening a pipe blocks until there is a writer
            raise InputError(f"Expected {_EXPECTED}, but {path} is not a regular file.")
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".csv", ".parquet"):
        raise InputError(f"Expected {_EXPECTED}, got {path}.")
    return suffix


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn operating system errors into ``InputError``."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"Expected {_EXPECTED}, but {path} does not exist.") from error
    except OSError as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error


@dataclass(frozen=True)
class Columns:
    """The column names of a table."""

    score: str = "score"
    presence: str = "present"
    identifier: str | None = None

    def side(self, path: Path, names: Sequence[str]) -> str:
        """Return the score column of a file with one side; a single column may have any name."""
        if len(names) == 1 and self.score == Columns.score:
            return names[0]
        return require_column(path, names, self.score)

    def table(self, path: Path, names: Sequence[str]) -> tuple[str, str]:
        """Return the score and presence columns of a table."""
        return require_column(path, names, self.score), require_column(path, names, self.presence)


def require_column(path: Path, names: Sequence[str], name: str) -> str:
    """Return ``name`` if exactly one column (or array) of the file has it."""
    if (number := names.count(name)) > 1:
        raise InputError(
            f"Expected one column {name!r} in {path}, got {number}: rename or delete the others."
        )
    if not number:
        raise InputError(f"Expected a column {name!r} in {path}, got {listed(names)}.")
    return name


def as_presence(path: Path, name: str, values: npt.NDArray[Any], start: int = 0) -> BoolArray:
    """Return booleans from 0, 1, true and false of any type; ``start`` is the number of earlier rows."""
    if values.dtype.kind == "b":
        return values
    present: BoolArray
    if values.dtype.kind in "iuf":
        present, is_valid = values == 1, np.isin(values, (0, 1))
    else:  # one by one: an array of strings allocates the longest length for every element
        meanings = [_PRESENCE.get(_word(value)) for value in values.flat]
        is_valid = np.array([meaning is not None for meaning in meanings], dtype=np.bool_)
        present = np.array(meanings, dtype=np.bool_).reshape(values.shape)
    if not is_valid.all():
        row = int(np.flatnonzero(~is_valid)[0])
        where = f"{_shortened(str(values.flat[row]))} in row {start + row + 1}"
        raise InputError(f"Expected 0, 1, true or false in {name!r} of {path}, got {where}.")
    return present


def _word(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.lower()


def read_csv_side(path: Path, columns: Columns) -> FloatArray:
    """Return the scores of one side: the single column, or the one named in the header."""
    header, rows = _with_header(path)
    if isinstance(header, int) and header != 1:
        raise InputError(
            f"Expected one column, or a header that names {columns.score!r}, in {path}, got {header} "
            "columns without a header."
        )
    column = 0 if isinstance(header, int) else header.index(columns.side(path, header))
    words = ((line, _cell(path, line, cells, column)) for line, cells in rows)
    return _stored_numbers(path, (_number(path, *word) for word in words))


def read_csv_table(path: Path, columns: Columns) -> tuple[FloatArray, BoolArray]:
    """Return scores and presence by the names in the header; without a header, the first two columns."""
    header, rows = _with_header(path)
    if isinstance(header, int):
        if header != 2:
            raise InputError(
                f"Expected a score and a presence column in {path}, got {header} columns without a header."
            )
        indices = [0, 1]
    else:
        indices = [header.index(name) for name in columns.table(path, header)]
    presence = array("b")

    def numbers() -> Iterator[float]:
        for line, cells in rows:
            score, word = (_cell(path, line, cells, column) for column in indices)
            presence.append(_presence(path, line, word))
            yield _number(path, line, score)

    return _stored_numbers(path, numbers()), np.frombuffer(presence, dtype=np.bool_)


def read_csv_words(path: Path, name: str) -> list[str]:
    """Return the cells of the column with this name."""
    header, rows = _with_header(path)
    if isinstance(header, int):
        raise InputError(f"Expected a column {name!r} in {path}, got no header.")
    column = header.index(require_column(path, header, name))
    return [_cell(path, line, cells, column) for line, cells in rows]


def _rows(path: Path) -> Iterator[_Row]:
    """Yield each non-empty row with its line number."""
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            lines = _BoundedLines(path, file)
            reader = csv.reader(lines)
            for cells in reader:
                lines.of_row = 0
                if any(cells):
                    yield reader.line_num, [cell.strip() for cell in cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"Expected comma-separated text in {path}: {error}.") from error


class _BoundedLines:
    """The lines of a file; a line or row that is too long raises ``InputError``."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self.of_row = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        self.of_row += 1
        if len(line) > _LONGEST_LINE or self.of_row > _MOST_LINES:
            raise InputError(
                f"Expected lines of at most {_LONGEST_LINE:,} characters and rows of at most {_MOST_LINES:,} "
                f"lines in {self._path}, got a longer one."
            )
        return line


def _with_header(path: Path) -> tuple[list[str] | int, Iterator[_Row]]:
    """Return the names in the header, or the number of columns if there is none, and the rows of scores."""
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise InputError(f"Expected at least one score in {path}, got an empty file.")
    second = next(rows, None)
    _require_commas(path, first[1], [] if second is None else second[1])
    rows = rows if second is None else chain([second], rows)
    # a header contains no number
    if any(_is_number(cell) for cell in first[1]):
        return len(first[1]), chain([first], rows)
    return first[1], rows


def _require_commas(path: Path, first: list[str], second: list[str]) -> None:
    """Raise if both of the first two rows have another separator: a single name may contain one."""
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(first) == 1 and separator in first[0] and any(separator in cell for cell in second):
            raise InputError(
                f"Expected commas between the columns of {path}, got {name} in {_shortened(first[0])}."
            )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _cell(path: Path, line: int, cells: list[str], column: int) -> str:
    if column >= len(cells):
        raise InputError(f"Expected at least {column + 1} columns in {path}, line {line}, got {len(cells)}.")
    return cells[column]


def _number(path: Path, line: int, word: str) -> float:
    number = math.nan
    if word.isascii() and "_" not in word:  # Python reads 1_000 and the digits of every script
        with suppress(ValueError):
            number = float(word)
    if not math.isfinite(number):
        raise InputError(f"Expected a finite number in {path}, line {line}, got {_shortened(word)}.")
    return number


def _presence(path: Path, line: int, word: str) -> bool:
    if (lower := word.lower()) not in _PRESENCE:
        raise InputError(f"Expected 0, 1, true or false in {path}, line {line}, got {_shortened(word)}.")
    return _PRESENCE[lower]


def _stored_numbers(path: Path, numbers: Iterator[float]) -> npt.NDArray[Any]:
    def pieces() -> Iterator[FloatArray]:
        while (piece := np.fromiter(islice(numbers, PIECE), np.float64)).size:
            yield piece

    return stored(path, pieces())


def read_npy(path: Path) -> npt.NDArray[Any]:
    """Memory-map the array, which may be larger than memory."""
    with _intact(path, _NPY, "a .npy file"):
        return map_array(path)


class NpzArchive:
    """The arrays of an open .npz file, each unpacked on access."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path, self._archive = path, archive
        self._unpacked = 0
        self.names = [name.removesuffix(".npy") for name in archive.namelist()]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        require_column(self._path, self.names, name)
        member = self._archive.infolist()[self.names.index(name)]
        self._unpacked += member.file_size
        require_moderate(self._path, self._unpacked)
        with temporary(self._path) as file, self._archive.open(member) as packed:
            if packed.read(len(_NPY)) != _NPY:
                raise InputError(f"Expected {name!r} in {self._path} to be an array, got something else.")
            file.write(_NPY)
            shutil.copyfileobj(packed, file, 1 << 20)  # at most member.file_size bytes
            file.flush()
            array = deleted_after_use(map_array(Path(file.name)), file.name)
        if array.dtype.itemsize == 0:
            raise InputError(f"Expected {name!r} in {self._path} to be an array, got one of empty values.")
        return array


@contextmanager
def open_npz(path: Path) -> Iterator[NpzArchive]:
    """Open the named arrays of a file."""
    with _intact(path, _ZIP, "an .npz file"), open_file(path) as file, zipfile.ZipFile(file) as archive:
        yield NpzArchive(path, archive)


@contextmanager
def _intact(path: Path, magic: bytes, kind: str) -> Iterator[None]:
    """Check the magic bytes, and turn numpy errors into ``InputError``."""
    with open_file(path) as file:
        if file.read(len(magic)) != magic:
            raise InputError(f"Expected {kind}, but {path} is not one, despite its name.")
    try:
        yield
    except InputError:
        raise
    except _DAMAGED as error:
        if "object" in str(error).lower():
            raise InputError(
                f"Expected numbers in {path}, got pickled Python objects, which are not read."
            ) from error
        raise InputError(f"Expected {kind}, but {path} is truncated or damaged.") from error


def read_parquet_side(path: Path, columns: Columns) -> npt.NDArray[Any]:
    """Return the scores of one side: the single column, or the named one."""
    with _opened(path) as file:
        name = columns.side(path, file.schema_arrow.names)
        return stored(path, (_numbers(path, name, column) for (column,) in _batches(path, file, [name])))


def read_parquet_table(path: Path, columns: Columns) -> tuple[npt.NDArray[Any], BoolArray]:
    """Return scores and presence."""
    presence: list[BoolArray] = []

    def numbers(file: Any) -> Iterator[npt.NDArray[Any]]:
        start, names = 0, columns.table(path, file.schema_arrow.names)
        for score, flag in _batches(path, file, names):
            presence.append(as_presence(path, names[1], _values(path, flag), start))
            start += len(flag)
            yield _numbers(path, names[0], score)

    with _opened(path, words=[columns.presence]) as file:
        return stored(path, numbers(file)), np.concatenate(presence)


def read_parquet_words(path: Path, name: str) -> npt.NDArray[Any]:
    """Return the values of the column with this name."""
    words: list[Any] = []
    with _opened(path, words=[name]) as file:
        for (column,) in _batches(path, file, [require_column(path, file.schema_arrow.names, name)]):
            words += _words(path, column, len(words) + len(column))
    return as_words(path, words)


@contextmanager
def _opened(path: Path, words: Sequence[str] = ()) -> Iterator[Any]:
    """Open the file; equal strings in the columns ``words`` are stored once."""
    try:
        import pyarrow  # noqa: PLC0415  # an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("Reading .parquet files", "parquet") from error
    damaged = pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError
    with open_file(path):  # an operating system error does not mean damage
        pass
    try:
        columns = [name for name in parquet.read_schema(path).names if name in words]
        with parquet.ParquetFile(path, read_dictionary=columns, pre_buffer=False) as file:
            yield file
    except InputError:
        raise
    except damaged as error:
        raise InputError(f"Expected a .parquet file, but {path} is truncated or damaged.") from error


def _batches(path: Path, file: Any, names: Sequence[str]) -> Iterator[list[Any]]:
    """Yield these columns in pieces, without empty values.

    The number of rows is checked first, because a few bytes may stand for many of them. Sizes of columns are
    not: for damaged metadata, pyarrow ends the process when they are read.
    """
    require_moderate(path, int(file.metadata.num_rows) * _WIDEST_SCORE * len(names))
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(names), use_threads=False):
        for name in names:
            if empty := batch.column(name).null_count:
                raise InputError(
                    f"Expected a value in every row of {name!r} of {path}, got {empty} empty ones."
                )
        yield [batch.column(name) for name in names]


def _numbers(path: Path, name: str, column: Any) -> npt.NDArray[Any]:
    from pyarrow import types  # noqa: PLC0415

    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise InputError(f"Expected numbers in {name!r} of {path}, got a column of type {kind}.")
    return _values(path, column)


def _words(path: Path, column: Any, num_rows: int) -> list[Any]:
    """Return the values of a column; each of its different words has to fit ``num_rows`` times."""
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    words = column.dictionary.to_pylist()
    require_moderate(path, _WIDEST_CHARACTER * max(map(len, words), default=0) * num_rows)
    return [words[index] for index in column.indices.to_numpy()]


def _values(path: Path, column: Any) -> npt.NDArray[Any]:
    if not hasattr(column, "dictionary"):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return np.array(_words(path, column, len(column)), dtype=object)


def as_words(path: Path, words: list[Any]) -> npt.NDArray[Any]:
    """Return an array of the values of a column, in which each has as much room as the longest one."""
    longest = max((len(word) for word in words if isinstance(word, str | bytes)), default=0)
    require_moderate(path, _WIDEST_CHARACTER * longest * len(words))
    return np.asarray(words)


def _shortened(word: str) -> str:
    """Return a value from a file, shortened for an error message."""
    return repr(word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}...")


def listed(names: Sequence[str]) -> str:
    """Return the first names from a file, for an error message."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(map(_shortened, names[:_MOST_NAMES])) or "none") + more

"""Score files: .csv, .npy, .npz and .parquet, read in bounded memory.

Every format is a :class:`ScoreTable`, whose columns are read one by one, as scores, as presence or as words.
Scores of packed formats are written to a temporary file, piece by piece, and memory-mapped like those of a
.npy file. A file that is damaged, or too large to unpack, raises an error that quotes little of it.
"""

from __future__ import annotations

import csv
import lzma
import math
import shutil
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import islice
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
from dpaudit._types import BoolArray
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.stats import chunks

_FILE = "a .npy, .npz, .csv or .parquet file"
_PRESENCE = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}
_LONGEST_WORD = 60  # characters of a quoted value
_MOST_NAMES = 10  # quoted in one message
_LONGEST_LINE = 1_000_000  # characters
_MOST_LINES = 1_000  # lines per row, whose cells may span several
_NPY = b"\x93NUMPY"
# what numpy, pyarrow, zipfile and its decompressors raise for damaged files
_DAMAGED = (
    *NOT_AN_ARRAY,
    LookupError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
_WIDEST_SCORE, _WIDEST_CHARACTER = 8, 4  # bytes
_PARQUET_ROWS = 1 << 16  # that are decoded at a time
PIECE = 1 << 18  # scores that are unpacked at a time, and the most that are then kept in memory

_Array: TypeAlias = npt.NDArray[Any]


class ScoreTable(ABC):
    """A file: the names of its columns (or arrays), and what is in them, by position."""

    names: Sequence[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unpacked = 0

    def _unpack(self, size: int) -> None:
        """Raise if this many bytes, and those of the other columns, are too many to unpack."""
        self._unpacked += size
        require_moderate(self.path, self._unpacked)

    @abstractmethod
    def scores(self, index: int) -> _Array:
        """Return numbers, in memory or on disk."""

    def presence(self, index: int) -> BoolArray:
        """Return booleans."""
        raise NotImplementedError

    def words(self, index: int) -> _Array:
        """Return values as they are."""
        raise NotImplementedError

    def index(self, name: str) -> int:
        """Return the position of the column with this name, of which there has to be exactly one."""
        if not self.names:
            raise InputError(
                f"{self.path} is one array, not a table; pass a .csv, .parquet or .npz table, or --with and "
                "--without."
            )
        if (count := self.names.count(name)) > 1:
            raise InputError(f"{self.path} has {count} columns {name!r}; rename or delete all but one.")
        if not count:
            is_bare = not any(self.names)
            got = f"{len(self.names)} columns without a header" if is_bare else listed(self.names)
            raise InputError(f"{self.path} has no column {name!r} (found: {got}).")
        return self.names.index(name)


@contextmanager
def opened(path: Path) -> Iterator[ScoreTable]:
    """Open a file; errors of the system, and what damaged files raise, become ``InputError``."""
    suffix = path.suffix.lower()
    kind = f"{'an' if suffix == '.npz' else 'a'} {suffix} file"
    try:
        _require_scores(path, suffix, kind)
        yield _FORMATS[suffix](path)
    except (InputError, MissingExtraError):
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist.") from error
    except OSError as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
    except _DAMAGED as error:
        if suffix == ".csv":  # any text is one
            raise
        if "object" in str(error).lower():
            raise InputError(
                f"{path} contains pickled Python objects, which are not read; save numbers."
            ) from error
        raise InputError(f"{path} is not {kind}: it is truncated or damaged.") from error


def _require_scores(path: Path, suffix: str, kind: str) -> None:
    """Raise unless there is a file that may hold scores; a pipe blocks until there is a writer."""
    path.stat()
    if path.is_dir():
        raise InputError(f"{path} is a directory; pass {_FILE}.")
    if not path.is_file():
        raise InputError(f"{path} is not a regular file; pass {_FILE}.")
    if suffix not in _FORMATS:
        raise InputError(f"{path} has an unknown format; pass {_FILE}.")
    magic = {".npy": _NPY, ".npz": b"PK", ".parquet": b"PAR1"}.get(suffix, b"")
    with open_file(path) as file:
        if file.read(len(magic)) != magic:
            raise InputError(f"{path} is not {kind}, despite its name.")


class _SingleArray(ScoreTable):
    """A .npy file, memory-mapped: it may be larger than memory."""

    names = ()

    def scores(self, index: int) -> _Array:
        del index
        return _as_floats(self.path, map_array(self.path))


class _Archive(ScoreTable):
    """The arrays of an .npz file, each unpacked when it is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            self.names = [name.removesuffix(".npy") for name in archive.namelist()]

    def scores(self, index: int) -> _Array:
        return _as_floats(self.path, self.words(index))

    def presence(self, index: int) -> BoolArray:
        return _as_presence(self.path, self.names[index], self.words(index))

    def words(self, index: int) -> _Array:
        name = self.names[index]
        with open_file(self.path) as file, zipfile.ZipFile(file) as archive:
            member = archive.infolist()[index]
            self._unpack(member.file_size)
            with temporary(self.path) as unpacked, archive.open(member) as packed:
                if packed.read(len(_NPY)) != _NPY:
                    raise InputError(f"{name!r} in {self.path} is not an array.")
                unpacked.write(_NPY)
                shutil.copyfileobj(packed, unpacked, 1 << 20)  # at most member.file_size bytes
                unpacked.flush()
                array = deleted_after_use(map_array(Path(unpacked.name)), unpacked.name)
        if array.dtype.itemsize == 0:
            raise InputError(f"{name!r} in {self.path} is an array of empty values.")
        return array


class _Parquet(ScoreTable):
    """A .parquet file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            from pyarrow import parquet  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise MissingExtraError("Reading .parquet files", "pyarrow") from error
        with _arrow_errors():
            self.names = parquet.read_schema(path).names

    def scores(self, index: int) -> _Array:
        return stored(self.path, self._numbers(index))

    def presence(self, index: int) -> BoolArray:
        pieces = self._pieces(index, words=[self.names[index]])
        return _as_presence(self.path, self.names[index], np.concatenate(list(pieces)))

    def words(self, index: int) -> _Array:
        pieces = self._pieces(index, words=[self.names[index]])
        return _as_words(self.path, [word for piece in pieces for word in piece.tolist()])

    def _numbers(self, index: int) -> Iterator[_Array]:
        for piece in self._pieces(index, words=[]):
            if piece.dtype.kind not in "iufb":
                raise InputError(f"Column {self.names[index]!r} of {self.path} must contain numbers.")
            yield piece

    def _pieces(self, index: int, words: list[str]) -> Iterator[_Array]:
        """Yield the values of a column, none of which may be missing; equal ``words`` are stored once.

        The number of rows is checked first, because a few bytes may stand for many of them. Sizes of columns
        are not: for damaged metadata, pyarrow ends the process when they are read.
        """
        from pyarrow import parquet  # noqa: PLC0415

        name = self.names[index]
        with (
            _arrow_errors(),
            parquet.ParquetFile(self.path, read_dictionary=words, pre_buffer=False) as file,
        ):
            self._unpack(int(file.metadata.num_rows) * _WIDEST_SCORE)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[name], use_threads=False):
                if empty := batch.column(0).null_count:
                    raise InputError(f"{empty} rows of column {name!r} of {self.path} have no value.")
                yield batch.column(0).to_numpy(zero_copy_only=False)


@contextmanager
def _arrow_errors() -> Iterator[None]:
    """Turn all errors of pyarrow into one that damaged files raise; some are only errors of the system."""
    from pyarrow import ArrowException  # noqa: PLC0415

    try:
        yield
    except (ArrowException, OSError) as error:
        raise RuntimeError("damaged") from error


class _Text(ScoreTable):
    """A .csv file; without a header, its names are empty."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        rows = [cells for _, cells in islice(self._rows(), 2)]
        if not rows:
            raise InputError(f"{path} is empty.")
        _require_commas(path, *rows)
        self._has_header = not any(map(_is_number, rows[0]))
        self.names = rows[0] if self._has_header else [""] * len(rows[0])

    def scores(self, index: int) -> _Array:
        numbers = (self._number(line, word) for line, word in self._cells(index))

        def pieces() -> Iterator[_Array]:
            while (piece := np.fromiter(islice(numbers, PIECE), np.float64)).size:
                yield piece

        return stored(self.path, pieces())

    def presence(self, index: int) -> BoolArray:
        return np.fromiter((self._flag(line, word) for line, word in self._cells(index)), np.bool_)

    def words(self, index: int) -> _Array:
        return _as_words(self.path, [word for _, word in self._cells(index)])

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each non-empty row with its line number."""
        try:
            with TextIOWrapper(open_file(self.path), encoding="utf-8-sig", newline="") as file:
                lines = _BoundedLines(self.path, file)
                reader = csv.reader(lines)
                for cells in reader:
                    lines.of_row = 0
                    if any(cells):
                        yield reader.line_num, [cell.strip() for cell in cells]
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{self.path} is not comma-separated text: {error}.") from error

    def _cells(self, index: int) -> Iterator[tuple[int, str]]:
        """Yield line number and word of a column, without its name."""
        for line, cells in islice(self._rows(), int(self._has_header), None):
            if index >= len(cells):
                raise InputError(
                    f"Line {line} of {self.path} must have at least {index + 1} columns, got {len(cells)}."
                )
            yield line, cells[index]

    def _number(self, line: int, word: str) -> float:
        number = math.nan
        if word.isascii() and "_" not in word:  # Python reads 1_000 and the digits of every script
            with suppress(ValueError):
                number = float(word)
        if not math.isfinite(number):
            raise InputError(f"Line {line} of {self.path} must have a finite number, got {_shortened(word)}.")
        return number

    def _flag(self, line: int, word: str) -> bool:
        if (lower := word.lower()) not in _PRESENCE:
            raise InputError(
                f"Line {line} of {self.path} must have 0, 1, true or false, got {_shortened(word)}."
            )
        return _PRESENCE[lower]


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
                f"{self._path} has a line of more than {_LONGEST_LINE:,} characters or a row of more than "
                f"{_MOST_LINES:,} lines."
            )
        return line


def _require_commas(path: Path, first: list[str], second: Sequence[str] = ()) -> None:
    """Raise if both of the first two rows have another separator: a single name may contain one."""
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(first) == 1 and separator in first[0] and any(separator in cell for cell in second):
            raise InputError(
                f"Columns of {path} must be separated by commas, got {name} in {_shortened(first[0])}."
            )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


_FORMATS: dict[str, Callable[[Path], ScoreTable]] = {
    ".npy": _SingleArray,
    ".npz": _Archive,
    ".csv": _Text,
    ".parquet": _Parquet,
}


def _as_floats(path: Path, scores: _Array) -> _Array:
    """Return many whole numbers as floats on disk, because they would be converted in memory."""
    if scores.dtype.kind not in "iub" or scores.size <= PIECE:
        return scores
    return stored(path, (piece for _, piece in chunks(scores)), scores.shape)


def _as_words(path: Path, words: list[Any]) -> _Array:
    """Return an array of the values of a column, in which each has as much room as the longest one."""
    longest = max((len(word) for word in words if isinstance(word, str | bytes)), default=0)
    require_moderate(path, _WIDEST_CHARACTER * longest * len(words))
    return np.asarray(words)


def _as_presence(path: Path, name: str, values: _Array) -> BoolArray:
    """Return booleans from 0, 1, true and false of any type."""
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
        where = f"{_shortened(str(values.flat[row]))} in row {row + 1}"
        raise InputError(f"{name!r} of {path} must contain 0, 1, true or false, got {where}.")
    return present


def _word(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.lower()


def _shortened(word: str) -> str:
    """Return a value from a file, shortened for an error message."""
    return repr(word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}...")


def listed(names: Sequence[str]) -> str:
    """Return the first names from a file, for an error message."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(map(_shortened, names[:_MOST_NAMES])) or "none") + more

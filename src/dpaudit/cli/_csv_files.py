"""Scores from .csv files, with a header or without."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TextIO, TypeAlias

import numpy as np

from dpaudit._foreign import open_file
from dpaudit.cli._columns import WORDS, Columns
from dpaudit.cli._sizes import shortened
from dpaudit.errors import InputError
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["read_side", "read_table"]

_Row: TypeAlias = tuple[int, list[str]]

_LONGEST = 1_000_000  # characters of a line
_OTHER_SIGNS = {";": "semicolons", "\t": "tabs"}  # as some programs separate columns
_MOST_LINES = 1_000  # of one row, whose cells may go over several


def read_side(path: Path, columns: Columns) -> FloatArray:
    """The scores of one side: the only column, or the one that the header names."""
    header, rows = _with_header(path)
    if isinstance(header, int):
        if header != 1:
            raise InputError(
                f"Expected one column, or a header that names {columns.score!r}, in {path}, got {header} "
                "columns without a header."
            )
        place = 0
    else:
        place = header.index(columns.side(path, header))
    scores = array("d", (_number(path, line, _cell(path, line, cells, place)) for line, cells in rows))
    return _not_empty(path, scores)


def read_table(path: Path, columns: Columns) -> tuple[FloatArray, BoolArray]:
    """Scores and presence, by the names in the header; without one, the first and the second column."""
    header, rows = _with_header(path)
    if isinstance(header, int):
        if header != 2:
            raise InputError(
                f"Expected a score and a presence column in {path}, got {header} columns without a header."
            )
        places = [0, 1]
    else:
        places = [header.index(name) for name in columns.table(path, header)]
    scores, presence = array("d"), array("b")
    for line, cells in rows:
        score, word = (_cell(path, line, cells, place) for place in places)
        scores.append(_number(path, line, score))
        presence.append(_presence(path, line, word))
    return _not_empty(path, scores), np.frombuffer(presence, dtype=np.bool_)


def _rows(path: Path) -> Iterator[_Row]:
    """Each line that is not empty, with its number."""
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            lines = _Lines(path, file)
            reader = csv.reader(lines)
            for cells in reader:
                lines.of_row = 0
                if any(cells):
                    yield reader.line_num, [cell.strip() for cell in cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"Expected comma-separated text in {path}: {error}.") from error


class _Lines:
    """The lines of a file that has some: neither one line nor one row may be all of it."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self.of_row = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_LONGEST + 1)
        if not line:
            raise StopIteration
        self.of_row += 1
        if len(line) > _LONGEST or self.of_row > _MOST_LINES:
            raise InputError(
                f"Expected lines of at most {_LONGEST:,} characters and rows of at most {_MOST_LINES:,} "
                f"lines in {self._path}, got a longer one."
            )
        return line


def _with_header(path: Path) -> tuple[list[str] | int, Iterator[_Row]]:
    """The names in the header, or the number of columns without one; and the rows of scores."""
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise InputError(f"Expected at least one score in {path}, got an empty file.")
    second = next(rows, None)
    _require_commas(path, first[1], [] if second is None else second[1])
    rows = rows if second is None else chain([second], rows)
    # a header has no number in it
    if any(_is_number(cell) for cell in first[1]):
        return len(first[1]), chain([first], rows)
    return first[1], rows


def _require_commas(path: Path, first: list[str], second: list[str]) -> None:
    """Two rows with another separator are no names that happen to have one in them."""
    for sign, name in _OTHER_SIGNS.items():
        if len(first) == 1 and sign in first[0] and any(sign in cell for cell in second):
            raise InputError(
                f"Expected commas between the columns of {path}, got {name} in {shortened(first[0])}."
            )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _cell(path: Path, line: int, cells: list[str], place: int) -> str:
    if place >= len(cells):
        raise InputError(f"Expected at least {place + 1} columns in {path}, line {line}, got {len(cells)}.")
    return cells[place]


def _number(path: Path, line: int, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"Expected a finite number in {path}, line {line}, got {shortened(word)}.")
    return number


def _presence(path: Path, line: int, word: str) -> bool:
    if (lower := word.lower()) not in WORDS:
        raise InputError(f"Expected 0, 1, true or false in {path}, line {line}, got {shortened(word)}.")
    return WORDS[lower]


def _not_empty(path: Path, scores: array[float]) -> FloatArray:
    if not scores:
        raise InputError(f"Expected at least one score in {path}, got only a header.")
    return np.frombuffer(scores, dtype=np.float64)

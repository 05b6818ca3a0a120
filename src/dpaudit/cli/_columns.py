"""Which column holds what, and what its presence words mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit.cli._sizes import listed, shortened
from dpaudit.errors import InputError
from dpaudit.stats._types import BoolArray

__all__ = ["WORDS", "Columns", "as_presence"]

WORDS = {"0": False, "1": True, "false": False, "true": True, "0.0": False, "1.0": True}


@dataclass(frozen=True)
class Columns:
    """The names of the columns of a table."""

    score: str = "score"
    presence: str = "present"

    def side(self, path: Path, names: Sequence[str]) -> str:
        """The column of scores in a file of one side; the only column may have any name."""
        if self.score in names:
            return self.score
        if len(names) == 1 and self.score == Columns.score:
            return names[0]
        raise InputError(f"Expected a column {self.score!r} in {path}, got {listed(names)}.")

    def table(self, path: Path, names: Sequence[str]) -> tuple[str, str]:
        """The columns of scores and of presence in a table."""
        for name in (self.score, self.presence):
            if name not in names:
                raise InputError(f"Expected a column {name!r} in {path}, got {listed(names)}.")
        return self.score, self.presence


def as_presence(path: Path, name: str, values: npt.NDArray[Any]) -> BoolArray:
    """Truth values from 0, 1, true and false in whatever type the file has them."""
    if values.dtype.kind == "b":
        return values
    found: BoolArray
    if values.dtype.kind in "iuf":
        found, known = values == 1, np.isin(values, (0, 1))
    else:  # one by one: an array of words has room for the longest one in every place
        meanings = [WORDS.get(_word(value)) for value in values.flat]
        known = np.array([meaning is not None for meaning in meanings], dtype=np.bool_)
        found = np.array(meanings, dtype=np.bool_).reshape(values.shape)
    if not known.all():
        row = int(np.flatnonzero(~known)[0])
        word = shortened(str(values.flat[row]))
        raise InputError(f"Expected 0, 1, true or false in {name!r} of {path}, got {word} in row {row + 1}.")
    return found


def _word(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.lower()

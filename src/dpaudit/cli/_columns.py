"""Which column holds what, and what its presence words mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
        raise InputError(f"Expected a column {self.score!r} in {path}, got {_listed(names)}.")

    def table(self, path: Path, names: Sequence[str]) -> tuple[str, str]:
        """The columns of scores and of presence in a table."""
        for name in (self.score, self.presence):
            if name not in names:
                raise InputError(f"Expected a column {name!r} in {path}, got {_listed(names)}.")
        return self.score, self.presence


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def as_presence(path: Path, name: str, values: npt.NDArray[Any]) -> BoolArray:
    """Truth values from 0, 1, true and false in whatever type the file has them."""
    if values.dtype.kind == "b":
        return values
    words = np.char.lower(values.astype(np.str_))
    bad = np.flatnonzero(~np.isin(words, list(WORDS)))
    if bad.size:
        word = values.reshape(-1)[bad[0]]
        raise InputError(
            f"Expected 0, 1, true or false in {name!r} of {path}, got {str(word)!r} in row {int(bad[0]) + 1}."
        )
    return np.isin(words, [word for word, present in WORDS.items() if present])

"""Score files: one table, or one file per side, as observations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit._io import stored
from dpaudit.cli._formats import PIECE, ScoreTable, listed, opened
from dpaudit.errors import InputError
from dpaudit.stats import Observations, chunks, is_on_disk


@dataclass(frozen=True)
class Columns:
    """The column names of a table."""

    score: str = "score"
    presence: str = "present"
    identifier: str | None = None

    def __post_init__(self) -> None:
        names = [name for name in (self.score, self.presence, self.identifier) if name is not None]
        if len(set(names)) < len(names):
            raise InputError(
                f"--score-column, --presence-column and --id-column must be different, got {listed(names)}."
            )

    def side(self, table: ScoreTable) -> int:
        """Return the score column of a file with one side; a single column may have any name."""
        is_named = self.score != Columns.score
        return 0 if len(table.names) <= 1 and not is_named else table.index(self.score)

    def both(self, table: ScoreTable) -> tuple[int, int]:
        """Return the columns of scores and of presence; the first two of two without a header."""
        if list(table.names) == ["", ""]:
            return 0, 1
        return table.index(self.score), table.index(self.presence)


@dataclass(frozen=True)
class ScoreFiles:
    """The score files: one table, or one file per side."""

    table: Path | None
    with_canary: Path | None
    without_canary: Path | None
    columns: Columns
    presence: Path | None = None

    def read(self, *, normalized: bool, paired: bool = False, coupled: bool = False) -> Observations:
        """Read the observations; .npy files stay on disk."""
        design = {"normalized": normalized, "coupled": coupled}
        named = {"TABLE": self.table, "--with": self.with_canary, "--without": self.without_canary}
        files = {name: path for name, path in named.items() if path is not None}
        if list(files) == ["TABLE"]:
            if self.presence is not None:
                return self._joined(files["TABLE"], self.presence, paired=paired, **design)
            return self._from_table(files["TABLE"], paired=paired, **design)
        if self.presence is not None or self.columns.identifier is not None or paired:
            raise InputError("--presence, --id-column and --paired need a TABLE of scores.")
        if list(files) == ["--with", "--without"]:
            return self._from_sides(files["--with"], files["--without"], **design)
        got = " and ".join(files) or "neither"
        raise InputError(f"Pass either a TABLE or both --with and --without, got {got}.")

    def _from_sides(self, with_canary: Path, without_canary: Path, **design: Any) -> Observations:
        sides = []
        for path in (with_canary, without_canary):
            with opened(path) as table:
                sides.append(table.scores(self.columns.side(table)))
        observations = Observations(with_canary=sides[0], without_canary=sides[1], **design)
        if with_canary.samefile(without_canary):  # also by two names
            raise InputError(
                f"{with_canary} was passed both --with and --without the canary; pass a file with scores "
                "and presence as TABLE."
            )
        return observations

    def _from_table(self, path: Path, *, paired: bool, **design: Any) -> Observations:
        sides, name = ("with_canary", "without_canary"), self.columns.identifier
        with opened(path) as table:
            if path.suffix == ".npz" and set(sides) <= set(table.names):
                present, absent = (table.scores(table.index(side)) for side in sides)
                return Observations(with_canary=present, without_canary=absent, **design)
            score, presence = self.columns.both(table)
            present, scores = table.presence(presence), table.scores(score)
            ids = None if name is None else table.words(table.index(name))
            if ids is None and not paired and _is_long(scores, present):
                present, absent = _split(path, scores, present)
                return Observations(with_canary=present, without_canary=absent, **design)
        return Observations.from_presence(np.array(scores), present, ids=ids, paired=paired, **design)

    def _joined(self, path: Path, presence: Path, **design: Any) -> Observations:
        """Return the scores of one table with the presence of another, joined by identifiers."""
        name = self.columns.identifier
        if name is None:
            raise InputError("--presence needs --id-column, by which both files are joined.")
        with opened(path) as table:
            ids, scores = table.words(table.index(name)), table.scores(self.columns.side(table))
        with opened(presence) as table:
            present_ids = table.words(table.index(name))
            present = table.presence(table.index(self.columns.presence))
        if (ids.dtype.kind in "iu") != (present_ids.dtype.kind in "iu"):  # a .csv file has no integers
            ids, present_ids = ids.astype(np.str_), present_ids.astype(np.str_)
        return Observations.from_presence(scores, present, ids=ids, present_ids=present_ids, **design)


def _is_long(scores: npt.NDArray[Any], present: npt.NDArray[Any]) -> bool:
    """Return whether both sides stay on disk: a table of this size is split piece by piece."""
    is_split = present.shape == scores.shape and 0 < np.count_nonzero(present) < present.size
    return bool(is_split and scores.ndim == 1 and scores.size > PIECE)


def _split(path: Path, scores: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> list[npt.NDArray[Any]]:
    """Return the one-dimensional scores with and without the canary, in temporary files."""
    return [
        stored(path, (piece[present[start : start + piece.size] == side] for start, piece in chunks(scores)))
        for side in (True, False)
    ]


def negated(observations: Observations) -> Observations:
    """Return the observations with negated scores; those of a file are negated in a temporary one."""
    sides: dict[str, Any] = {}
    for name in ("with_canary", "without_canary"):
        scores = getattr(observations, name)
        if is_on_disk(scores):
            pieces = (-piece.astype(np.float64) for _, piece in chunks(scores))
            sides[name] = stored(Path(scores.filename), pieces, scores.shape)
        else:
            sides[name] = -scores
    return replace(observations, **sides)

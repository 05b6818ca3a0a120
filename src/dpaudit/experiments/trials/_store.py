"""The trials of a run, on disk as soon as they end."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from dpaudit import _files
from dpaudit._foreign import open_file
from dpaudit.errors import InputError
from dpaudit.experiments._difference import difference
from dpaudit.experiments.trials._database import DAMAGED, connect, is_sound, reading, writing
from dpaudit.experiments.trials._plan import TrialPlan
from dpaudit.experiments.trials._row import COLUMNS, Values, mistake, rows, sealed
from dpaudit.experiments.trials._task import Finished
from dpaudit.experiments.trials._trial import Group

__all__ = ["STORE_NAME", "Store", "open_store"]

STORE_NAME = "trials.sqlite3"
_TABLES = (
    "CREATE TABLE about (schema_version INTEGER NOT NULL, identity TEXT NOT NULL)",
    "CREATE TABLE trials (number INTEGER PRIMARY KEY, seed TEXT NOT NULL, present INTEGER NOT NULL, "
    "score REAL, duration REAL NOT NULL, host TEXT NOT NULL, error TEXT, attempts INTEGER NOT NULL, "
    "checksum TEXT NOT NULL)",
)
_READ = f"SELECT {', '.join(COLUMNS)} FROM trials"
# a score is never replaced, an error is
_WRITE = (
    f"INSERT INTO trials ({', '.join(COLUMNS)}) VALUES ({', '.join('?' for _ in COLUMNS)}) "
    f"ON CONFLICT (number) DO UPDATE SET ({', '.join(COLUMNS[3:])}) = "
    f"({', '.join(f'excluded.{name}' for name in COLUMNS[3:])}) WHERE error IS NOT NULL"
)


@contextmanager
def open_store(folder: Path, plan: TrialPlan) -> Iterator[Store]:
    """The store of a folder that nobody else runs in meanwhile."""
    with _files.locked(folder), Store(folder, plan) as store:
        yield store


class Store:
    """One row a trial; only for a plan, and refused if it holds the trials of another.

    Rows that were damaged are dropped, so that their trials are computed again; ``remarks`` says which. The
    folder has to be locked by the caller; :func:`open_store` does that too.
    """

    schema_version: ClassVar[int] = 2

    def __init__(self, folder: Path, plan: TrialPlan) -> None:
        self.path = folder / STORE_NAME
        self.scores: dict[int, float] = {}
        """Of the trials that have one, by number."""
        self.failures: dict[int, str] = {}
        """Why the others that were tried have none."""
        self.attempts: dict[int, int] = {}
        """How often each was tried, not counting workers that died."""
        self.remarks: list[str] = []
        self._plan, self._identity = plan, json.dumps(plan.identity(), sort_keys=True, allow_nan=False)
        self._digest = hashlib.sha256(self._identity.encode()).hexdigest()
        self._connection = connect(self.path)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def write(self, group: Group, finished: Finished) -> None:
        """Keep what became of a group, all or nothing, but never another score for a trial that has one."""
        new = [row for row in rows(group, finished, self.attempts) if row.number not in self.scores]
        with writing(self.path), self._transaction():
            self._connection.executemany(_WRITE, [sealed(row, self._digest) for row in new])
        for row in new:
            self._take(row.number, row.score, row.error, row.attempts)

    def _begin(self) -> None:
        with reading(self.path):
            found = self._connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
            if found and [sql for (sql,) in found] != list(_TABLES):  # a view could be without an end
                raise sqlite3.DatabaseError("it has other tables")
        if not found:  # also a file without content: a process that was killed at once leaves one
            self._make()
            return
        self._require_same_plan()
        if not is_sound(self._connection):
            self._rescue()
        self._read()

    def _make(self) -> None:
        with writing(self.path), self._transaction():
            for statement in _TABLES:
                self._connection.execute(statement)
            about = self.schema_version, self._identity
            self._connection.execute("INSERT INTO about VALUES (?, ?)", about)

    def _require_same_plan(self) -> None:
        with reading(self.path):
            found = self._connection.execute("SELECT schema_version, identity FROM about").fetchone()
        if found is None or found[0] != self.schema_version:
            raise InputError(
                f"Expected trials of this version of dpaudit in {self.path}, got those of another; give "
                "another output."
            )
        other = difference(_plain(found[1]), json.loads(self._identity))
        if other is not None:
            raise InputError(
                f"Expected the trials of this run in {self.path}, got those of another: {other}; give "
                "another output."
            )

    def _rescue(self) -> None:
        """Go on with a copy of the rows that can still be read, which takes the place of the file at once."""
        kept = [values for values in self._salvaged() if self._mistake(values) is None]
        self._connection.close()
        aside = self.path.with_name(f"{self.path.name}.damaged")
        fresh = self.path.with_name(f".{self.path.name}.unfinished")
        with writing(self.path), open_file(self.path) as damaged:
            _files.write(aside, partial(shutil.copyfileobj, damaged), private=True)
        self._connection = connect(fresh)
        self._make()
        with writing(self.path), self._transaction():
            self._connection.executemany(_WRITE, kept)
        self._connection.close()
        with writing(self.path):
            fresh.replace(self.path)
        self._connection = connect(self.path)
        self.remarks.append(
            f"{self.path} was damaged: {len(kept)} of its trials could be kept, the others are computed "
            f"again; the damaged file is {aside}."
        )

    def _salvaged(self) -> Iterator[Values]:
        """The rows that can be read one by one."""
        for number in range(self._plan.num_trials):
            try:
                found = self._connection.execute(f"{_READ} WHERE number = ?", (number,)).fetchone()
            except DAMAGED:
                continue
            if found is not None:
                yield found

    def _read(self) -> None:
        with reading(self.path):
            stored = self._connection.execute(_READ).fetchall()
        broken = {values[0]: text for values in stored if (text := self._mistake(values)) is not None}
        for values in stored:
            if values[0] not in broken:
                self._take(values[0], values[3], *values[6:8])
        if broken:
            self._drop(broken)

    def _mistake(self, values: Values) -> str | None:
        return mistake(values, self._plan.trials, self._digest)

    def _drop(self, broken: dict[int, str]) -> None:
        with writing(self.path), self._transaction():
            numbers = [(number,) for number in broken]
            self._connection.executemany("DELETE FROM trials WHERE number = ?", numbers)
        self.remarks += [
            f"The row of trial {number} was damaged, {text}; the trial is computed again."
            for number, text in broken.items()
        ]

    def _take(self, number: int, score: float | None, error: str | None, attempts: int) -> None:
        self.attempts[number] = attempts
        self.failures.pop(number, None)
        if score is not None:
            self.scores[number] = score
        else:
            self.failures[number] = error or ""

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._undo()
            raise

    def _undo(self) -> None:
        try:
            self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            self.close()  # the journal is on disk, and undoes it at the next opening


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None

"""Store of a run's trials: a SQLite file with one row per trial, written as soon as the trial ends.

Each :class:`TrialRow` has a checksum, so that a damaged row is detected and its trial is repeated. A file
whose structure is damaged is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeAlias

from dpaudit import _io
from dpaudit._interrupts import is_about_input, raise_if_machine
from dpaudit._io import LARGEST_ARRAY, difference, open_file
from dpaudit.errors import IncompleteError, InputError
from dpaudit.experiments.trials._task import Finished
from dpaudit.experiments.trials._trial_plan import Group, TrialPlan

_Values: TypeAlias = tuple[Any, ...]


@contextmanager
def open_store(folder: Path, plan: TrialPlan) -> Iterator[Store]:
    """Open the store in a directory and lock the directory against other processes."""
    with _io.locked(folder), Store(folder, plan) as store:
        yield store


@dataclass(frozen=True)
class TrialRow:
    """Finished trial in the store, with a score or an error."""

    number: int
    seed: str  # 32 hexadecimal digits: too large for an integer column
    present: int
    score: float | None
    duration: float
    host: str
    error: str | None
    attempts: int

    def with_checksum(self, digest: str) -> _Values:
        """Return the values with their checksum, which depends on the ``digest`` of the run."""
        values = astuple(self)
        return (*values, _checksum(values, digest))


_TABLES: Final = (
    "CREATE TABLE about (schema_version INTEGER NOT NULL, identity TEXT NOT NULL)",
    "CREATE TABLE trials (number INTEGER PRIMARY KEY, seed TEXT NOT NULL, present INTEGER NOT NULL, "
    "score REAL, duration REAL NOT NULL, host TEXT NOT NULL, error TEXT, attempts INTEGER NOT NULL, "
    "checksum TEXT NOT NULL)",
)
_COLUMNS: Final = (*(field.name for field in fields(TrialRow)), "checksum")
_MACHINE_CODES: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}
)
_INPUT_CODES: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY})


class Store:
    """Trials of one plan, one row each; a file with the trials of another plan is rejected.

    Damaged rows are dropped, so that their trials are repeated; ``remarks`` lists them. The caller must lock
    the directory, or use :func:`open_store`.
    """

    schema_version: ClassVar[int] = 2

    def __init__(self, folder: Path, plan: TrialPlan) -> None:
        self.path = folder / "trials.sqlite3"
        self.scores: dict[int, float] = {}
        """Scores by trial number."""
        self.failures: dict[int, str] = {}
        """Errors of failed trials by trial number."""
        self.attempts: dict[int, int] = {}
        """Number of attempts per trial, not counting workers that died."""
        self.remarks: list[str] = []
        self._identity = json.dumps(plan.identity(), sort_keys=True, allow_nan=False)
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
        """Close the file."""
        self._connection.close()

    def write(self, group: Group, finished: Finished) -> None:
        """Write the result of a group in one transaction; existing scores are not overwritten, errors are."""
        _io.require_lock(self.path)
        rows = [row for row in _rows(group, finished, self.attempts) if row.number not in self.scores]
        changed = _COLUMNS[3:]
        statement = (
            f"INSERT INTO trials ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' for _ in _COLUMNS)}) "
            f"ON CONFLICT (number) DO UPDATE SET ({', '.join(changed)}) = "
            f"({', '.join(f'excluded.{name}' for name in changed)}) WHERE error IS NOT NULL"
        )
        digest = _digest(self._identity)
        with _writing(self.path), self._transaction():
            self._connection.executemany(statement, [row.with_checksum(digest) for row in rows])
        for row in rows:
            self._note(row)

    def _begin(self) -> None:
        with _reading(self.path):
            is_new = not _has_tables(self._connection)
        if is_new:
            self._make()
            return
        with _reading(self.path):
            about = self._connection.execute("SELECT schema_version, identity FROM about").fetchone()
        self._require_same_plan(about)
        with _reading(self.path):
            rows = _sound_rows(self._connection)
        self._take(rows)

    def _make(self) -> None:
        with _writing(self.path), self._transaction():
            for statement in _TABLES:
                self._connection.execute(statement)
            about = self.schema_version, self._identity
            self._connection.execute("INSERT INTO about VALUES (?, ?)", about)

    def _require_same_plan(self, about: _Values | None) -> None:
        if about is None or about[0] != self.schema_version:
            raise InputError(
                f"Expected trials of this version of dpaudit in {self.path}, got those of another; choose "
                "another output directory."
            )
        other = difference(_decoded(about[1]), json.loads(self._identity))
        if other is not None:
            raise InputError(
                f"Expected the trials of this run in {self.path}, got those of another: {other}; choose "
                "another output directory."
            )
        self._identity = about[1]  # the same run, as written by the version that started it

    def _take(self, rows: list[_Values]) -> None:
        """Note the intact rows, and drop the others."""
        digest, damaged = _digest(self._identity), []
        for *values, checksum in rows:
            if checksum == _checksum(tuple(values), digest):
                self._note(TrialRow(*values))
            else:
                damaged.append(values[0])
        if damaged:
            with _writing(self.path), self._transaction():
                numbers = [(number,) for number in damaged]
                self._connection.executemany("DELETE FROM trials WHERE number = ?", numbers)
        self.remarks += [
            f"The row of trial {number} was damaged; the trial is repeated." for number in damaged
        ]

    def _note(self, row: TrialRow) -> None:
        self.attempts[row.number] = row.attempts
        self.failures.pop(row.number, None)
        if row.score is not None:
            self.scores[row.number] = row.score
        else:
            self.failures[row.number] = row.error or ""

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
            self.close()  # the journal is on disk and is rolled back the next time the file is opened


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None


def _rows(group: Group, finished: Finished, attempts: Mapping[int, int]) -> Iterator[TrialRow]:
    """Yield the rows of a group, which share its duration; ``attempts`` counts earlier attempts."""
    duration = finished.seconds / len(group)
    for trial, score, error in zip(group, finished.scores, finished.errors, strict=True):
        yield TrialRow(
            trial.number,
            f"{trial.seed:032x}",
            int(trial.present),
            None if score is None else score + 0.0,  # SQLite has no negative zero
            duration,
            finished.host,
            error,
            1 + attempts.get(trial.number, 0),
        )


def _digest(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()


def _checksum(values: _Values, digest: str) -> str:
    text = json.dumps([digest, *values], default=repr)  # the text of a float is exact
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def connect(path: Path) -> sqlite3.Connection:
    """Open the file; create it if it is missing.

    A rollback journal is used instead of a write-ahead log, which needs shared memory: the file works on
    network file systems of clusters, and a commit that fails on a full disk leaves it unchanged. A commit is
    on disk when it returns, at a cost that is small compared to a group of trials.
    """
    _require_database(path)
    with _writing(path):
        if not path.exists():
            path.touch(mode=0o600)  # it will contain seeds; SQLite gives its journal the same mode
        connection = _limited(path)
    try:
        with _reading(path):
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = EXTRA")
    except BaseException:
        connection.close()
        raise
    return connection


def _limited(path: Path) -> sqlite3.Connection:
    """Connect to a file that may be damaged, or read by another process."""
    connection = sqlite3.connect(path, timeout=60.0, isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000_000)  # bytes of a text or number
    # damaged text must be readable so that it can be reported
    connection.text_factory = lambda data: data.decode(errors="replace")
    return connection


def count_rows(path: Path) -> int:
    """Return the number of trials in a store, without its plan; raise if a row is damaged.

    A copy is read, in which SQLite undoes what a killed process has not committed: nothing is written beside
    the store.
    """
    _require_database(path)
    with _reading(path):
        identity, rows = _copied_rows(path)
    digest = _digest(identity)
    for *values, checksum in rows:
        if checksum != _checksum(tuple(values), digest):
            raise InputError(
                f"Expected intact trials in {path}, but the row of trial {values[0]!s:.20} is damaged; run "
                "the same command again to repeat the trial."
            )
    return len(rows)


def _copied_rows(path: Path) -> tuple[str, list[_Values]]:
    """Return the identity and all rows of a copy of a store; raise ``DatabaseError`` if it is damaged."""
    with tempfile.TemporaryDirectory(prefix="dpaudit-") as folder:
        for end in ("", "-journal", "-wal"):
            source = path.with_name(f"{path.name}{end}")
            if source.exists():
                with open_file(source) as file, (Path(folder) / source.name).open("xb") as copy:
                    shutil.copyfileobj(file, copy)
        with closing(_limited(Path(folder) / path.name)) as connection:
            if not _has_tables(connection):
                return "", []
            rows = _sound_rows(connection)
            for (identity,) in connection.execute("SELECT identity FROM about"):
                return str(identity), rows
            raise sqlite3.DatabaseError("it does not name its run")


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Return whether the tables exist; the file of a process that was killed immediately has none."""
    tables = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master ORDER BY name")]
    if tables and tables != list(_TABLES):  # a view could run forever
        raise sqlite3.DatabaseError("it has other tables")
    return bool(tables)


def _sound_rows(connection: sqlite3.Connection) -> list[_Values]:
    """Return all rows; raise ``DatabaseError`` if the structure of the file is damaged."""
    (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if answer != "ok":
        raise sqlite3.DatabaseError("it is damaged")
    return connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM trials").fetchall()


def _require_database(path: Path) -> None:
    """Raise on other files: SQLite treats a small one as an empty database and overwrites it."""
    magic, start = b"SQLite format 3\0", b""
    with _reading(path):
        if path.exists():
            with open_file(path) as file:
                start = file.read(len(magic))
            if path.stat().st_size > LARGEST_ARRAY:  # of all values together: they are stored as they are
                raise sqlite3.DatabaseError(f"it has more than {LARGEST_ARRAY:,} bytes")
        if start not in (b"", magic):
            raise sqlite3.DatabaseError("file is not a database")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise if the file cannot be read; it is left unchanged."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError, OSError) as error:  # a message may quote the file
        raise_if_machine(error, f"Cannot read {path}")
        if _primary_code(error) in _MACHINE_CODES:
            raise IncompleteError(f"Cannot read {path}: {error}.") from error
        raise InputError(
            f"Expected the trials of a run in {path}, but it cannot be read: {error}. The file was not "
            "changed; move it away or choose another output directory."
        ) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise if the file cannot be written; earlier trials are kept."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        _io.require_lock(path)  # the directory may have vanished after the write began
        code, reason = _primary_code(error), f"Cannot write {path}: {error}."
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):  # in a place not needed to read it
            raise InputError(f"{reason} Move it away or choose another output directory.") from error
        is_input = isinstance(error, OSError) and is_about_input(error)
        kind = InputError if is_input or code in _INPUT_CODES else IncompleteError
        raise kind(
            f"{reason} The trials finished so far are kept. Run the same command again to resume."
        ) from error


def _primary_code(error: Exception) -> int | None:
    """Return the error code of SQLite without the details in its higher bits; None if there is none."""
    code = getattr(error, "sqlite_errorcode", None)
    if not isinstance(code, int) or code == sqlite3.SQLITE_READONLY_DBMOVED:  # removed while it was in use
        return None
    return code & 0xFF

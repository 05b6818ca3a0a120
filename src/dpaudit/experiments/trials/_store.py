"""Store of a run's trials: a SQLite file with one row per trial, written as soon as the trial ends.

Each :class:`TrialRow` has a checksum, so that a damaged row is detected and its trial is repeated.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeAlias

from dpaudit import _io
from dpaudit._faults import is_about_input, raise_if_machine
from dpaudit._io import LARGEST_ARRAY, difference, open_file
from dpaudit.errors import IncompleteError, InputError
from dpaudit.experiments.trials._task import Finished
from dpaudit.experiments.trials._trial_plan import Group, Trial, TrialPlan

_FILE = "trials.sqlite3"
_TABLES = (
    "CREATE TABLE about (schema_version INTEGER NOT NULL, identity TEXT NOT NULL)",
    "CREATE TABLE trials (number INTEGER PRIMARY KEY, seed TEXT NOT NULL, present INTEGER NOT NULL, "
    "score REAL, duration REAL NOT NULL, host TEXT NOT NULL, error TEXT, attempts INTEGER NOT NULL, "
    "checksum TEXT NOT NULL)",
)
_COLUMNS = "number", "seed", "present", "score", "duration", "host", "error", "attempts", "checksum"
_READ = f"SELECT {', '.join(_COLUMNS)} FROM trials"
# scores are never overwritten, errors are
_WRITE = (
    f"INSERT INTO trials ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' for _ in _COLUMNS)}) "
    f"ON CONFLICT (number) DO UPDATE SET ({', '.join(_COLUMNS[3:])}) = "
    f"({', '.join(f'excluded.{name}' for name in _COLUMNS[3:])}) WHERE error IS NOT NULL"
)
_DAMAGED: Final = sqlite3.DatabaseError, UnicodeDecodeError  # the latter if an error message quotes the file
_MACHINE_CODES: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}
)
_INPUT_CODES: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY})
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_MOVED: Final = frozenset({sqlite3.SQLITE_READONLY_DBMOVED})  # the file was removed while it was in use
_MAGIC = b"SQLite format 3\0"
# the versions of the format for writing and for reading, in the header of the file
_HEADER, _VERSIONS, _WRITE_AHEAD = 20, slice(18, 20), b"\x02"
_LONGEST_VALUE = 10_000_000  # bytes of a text or number in the file
_BUSY_SECONDS = 60.0  # how long to wait for another process that reads the file
_Values: TypeAlias = tuple[Any, ...]


@contextmanager
def open_store(folder: Path, plan: TrialPlan) -> Iterator[Store]:
    """Open the store in a directory and lock the directory against other processes."""
    with _io.locked(folder), Store(folder, plan) as store:
        yield store


class Store:
    """Trials of one plan, one row each; a file with the trials of another plan is rejected.

    Damaged rows are dropped, so that their trials are repeated; ``remarks`` lists them. The caller must lock
    the directory, or use :func:`open_store`.
    """

    schema_version: ClassVar[int] = 2

    def __init__(self, folder: Path, plan: TrialPlan) -> None:
        self.path = folder / _FILE
        self.scores: dict[int, float] = {}
        """Scores by trial number."""
        self.failures: dict[int, str] = {}
        """Errors of failed trials by trial number."""
        self.attempts: dict[int, int] = {}
        """Number of attempts per trial, not counting workers that died."""
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
        """Close the file."""
        self._connection.close()

    def write(self, group: Group, finished: Finished) -> None:
        """Write the result of a group in one transaction; existing scores are not overwritten."""
        _io.require_lock(self.path)
        new = [row for row in _rows(group, finished, self.attempts) if row.number not in self.scores]
        with _writing(self.path), self._transaction():
            self._connection.executemany(_WRITE, [_with_checksum(row, self._digest) for row in new])
        for row in new:
            self._note(row.number, row.score, row.error, row.attempts)

    def _begin(self) -> None:
        with _reading(self.path):
            found = self._connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
            if found and [sql for (sql,) in found] != list(_TABLES):  # a view could run forever
                raise sqlite3.DatabaseError("it has other tables")
        if not found:  # a new file, or the empty one of a process that was killed immediately
            self._make()
            return
        self._require_same_plan()
        if not _is_sound(self._connection):
            self._rescue()
        self._read()

    def _make(self) -> None:
        with _writing(self.path), self._transaction():
            for statement in _TABLES:
                self._connection.execute(statement)
            about = self.schema_version, self._identity
            self._connection.execute("INSERT INTO about VALUES (?, ?)", about)

    def _require_same_plan(self) -> None:
        with _reading(self.path):
            found = self._connection.execute("SELECT schema_version, identity FROM about").fetchone()
        if found is None or found[0] != self.schema_version:
            raise InputError(
                f"Expected trials of this version of dpaudit in {self.path}, got those of another; choose "
                "another output directory."
            )
        other = difference(_decoded(found[1]), json.loads(self._identity))
        if other is not None:
            raise InputError(
                f"Expected the trials of this run in {self.path}, got those of another: {other}; choose "
                "another output directory."
            )
        self._identity = found[1]  # the same run, as written by the version that started it
        self._digest = hashlib.sha256(self._identity.encode()).hexdigest()

    def _rescue(self) -> None:
        """Replace the file atomically with a copy of the rows that can still be read."""
        kept = [values for values in self._salvaged() if self._damage(values) is None]
        self._connection.close()
        aside = self.path.with_name(f"{self.path.name}.damaged")
        fresh = self.path.with_name(f".{self.path.name}.unfinished")
        with _writing(self.path), open_file(self.path) as damaged:
            _io.write(aside, partial(shutil.copyfileobj, damaged), private=True)
        self._connection = connect(fresh)
        self._make()
        with _writing(self.path), self._transaction():
            self._connection.executemany(_WRITE, kept)
        self._connection.close()
        with _writing(self.path):
            fresh.replace(self.path)
        self._connection = connect(self.path)
        self.remarks.append(
            f"{self.path} was damaged: {len(kept)} of its trials could be recovered, the others are "
            f"repeated; the damaged file was copied to {aside}."
        )

    def _salvaged(self) -> Iterator[_Values]:
        """Yield the rows that can be read one by one."""
        for number in range(self._plan.num_trials):
            try:
                found = self._connection.execute(f"{_READ} WHERE number = ?", (number,)).fetchone()
            except _DAMAGED:
                continue
            if found is not None:
                yield found

    def _read(self) -> None:
        with _reading(self.path):
            stored = self._connection.execute(_READ).fetchall()
        broken = {values[0]: text for values in stored if (text := self._damage(values)) is not None}
        for values in stored:
            if values[0] not in broken:
                self._note(values[0], values[3], *values[6:8])
        if broken:
            self._drop(broken)

    def _damage(self, values: _Values) -> str | None:
        return _row_damage(values, self._plan.trials, self._digest)

    def _drop(self, broken: dict[int, str]) -> None:
        with _writing(self.path), self._transaction():
            numbers = [(number,) for number in broken]
            self._connection.executemany("DELETE FROM trials WHERE number = ?", numbers)
        self.remarks += [
            f"The row of trial {number} was damaged ({text}); the trial is repeated."
            for number, text in broken.items()
        ]

    def _note(self, number: int, score: float | None, error: str | None, attempts: int) -> None:
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
            self.close()  # the journal is on disk and is rolled back the next time the file is opened


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None


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


def _rows(group: Group, finished: Finished, attempts: Mapping[int, int]) -> Iterator[TrialRow]:
    """Yield the rows of a group, which share its duration; ``attempts`` counts earlier attempts."""
    duration = finished.seconds / len(group)
    for trial, score, error in zip(group, finished.scores, finished.errors, strict=True):
        yield TrialRow(
            trial.number,
            _seed(trial),
            int(trial.present),
            None if score is None else score + 0.0,  # SQLite has no negative zero
            duration,
            finished.host,
            error,
            1 + attempts.get(trial.number, 0),
        )


def _with_checksum(row: TrialRow, digest: str) -> _Values:
    """Return the values of a row with their checksum, which depends on the ``digest`` of the run."""
    values = astuple(row)
    return (*values, _checksum(values, digest))


def _row_damage(values: Sequence[Any], trials: Sequence[Trial], digest: str) -> str | None:
    """Return what is wrong with a stored row, as part of a sentence; None if it is valid."""
    *kept, checksum = values
    number, seed, present, score, _, _, error, attempts = kept
    if not isinstance(number, int) or not 0 <= number < len(trials):
        return "there is no such trial"
    trial = trials[number]
    if seed != _seed(trial):
        return "its seed does not match its number"
    if present not in (0, 1) or bool(present) != trial.present:
        return "its canary membership does not match its number"
    wrong = _result_damage(score, error, attempts)
    if wrong is not None:
        return wrong
    return None if checksum == _checksum(tuple(kept), digest) else "its checksum does not match"


def _result_damage(score: Any, error: Any, attempts: Any) -> str | None:
    if error is None and not (isinstance(score, float) and math.isfinite(score)):
        return "its score is not a finite number"
    if error is not None and (score is not None or not isinstance(error, str)):
        return "it has both a score and an error"
    if not isinstance(attempts, int) or attempts < 1:
        return "its number of attempts is not positive"
    return None


def _seed(trial: Trial) -> str:
    return f"{trial.seed:032x}"


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
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    # damaged text must be readable so that it can be reported
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    connection.text_factory = lambda data: data.decode(errors="replace")
    try:
        with _reading(path):
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = EXTRA")
    except BaseException:
        connection.close()
        raise
    return connection


def count_rows(path: Path) -> int:
    """Return the number of trials in a store, without its plan; raise if a row is damaged.

    Nothing is written beside the store. What a killed process has not committed is undone in a copy.
    """
    _require_database(path)
    with _reading(path):
        try:
            identity, rows = _rows_of_copy(path) if _has_log(path) else _stored_rows(path, "?mode=ro")
        except sqlite3.OperationalError as error:
            if _primary_code(error) not in _INPUT_CODES or not _leftovers(path):
                raise
            identity, rows = _rows_of_copy(path)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    for *values, checksum in rows:
        if checksum != _checksum(tuple(values), digest):
            raise InputError(
                f"Expected intact trials in {path}, but the row of trial {values[0]!s:.20} is damaged; run "
                "the same command again to repeat the trial."
            )
    return len(rows)


def _leftovers(path: Path) -> list[Path]:
    """Return the files in which SQLite keeps what was not committed when the process was killed."""
    beside = [path.with_name(f"{path.name}{end}") for end in ("-journal", "-wal")]
    return [one for one in beside if one.exists()]


def _has_log(path: Path) -> bool:
    """Return whether the file was used with a write-ahead log, which SQLite makes even to read it."""
    with open_file(path) as file:
        return _WRITE_AHEAD in file.read(_HEADER)[_VERSIONS]


def _rows_of_copy(path: Path) -> tuple[str, list[_Values]]:
    """Read a copy of the store, in which SQLite undoes what was not committed."""
    with tempfile.TemporaryDirectory(prefix="dpaudit-") as folder:
        for one in (path, *_leftovers(path)):
            with open_file(one) as file, (Path(folder) / one.name).open("xb") as copy:
                shutil.copyfileobj(file, copy)
        return _stored_rows(Path(folder) / path.name)


def _stored_rows(path: Path, options: str = "") -> tuple[str, list[_Values]]:
    """Return the identity and all rows of a store; raise ``DatabaseError`` if its structure is damaged."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}{options}", uri=True)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        connection.text_factory = lambda data: data.decode(errors="replace")
        found = connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
        if not found:  # of a process that was killed immediately
            return "", []
        if [sql for (sql,) in found] != list(_TABLES) or not _is_sound(connection):
            raise sqlite3.DatabaseError("it is damaged")
        for (identity,) in connection.execute("SELECT identity FROM about"):
            return str(identity), connection.execute(_READ).fetchall()
        raise sqlite3.DatabaseError("it does not name its run")


def _require_database(path: Path) -> None:
    """Raise on other files: SQLite treats a small one as an empty database and overwrites it."""
    with _reading(path):
        start = b""
        if path.exists():
            with open_file(path) as file:
                start = file.read(len(_MAGIC))
            if path.stat().st_size > LARGEST_ARRAY:  # of all values together: they are stored as they are
                raise sqlite3.DatabaseError(f"it has more than {LARGEST_ARRAY:,} bytes")
        if start not in (b"", _MAGIC):
            raise sqlite3.DatabaseError("file is not a database")


def _is_sound(connection: sqlite3.Connection) -> bool:
    """Return whether the structure of the file is intact."""
    try:
        found: tuple[str] = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except _DAMAGED:
        return False
    return found[0] == "ok"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise if the file cannot be read; it is left unchanged."""
    try:
        yield
    except (*_DAMAGED, OSError) as error:
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
        code, said = _primary_code(error), f"Cannot write {path}: {error}."
        if code in _CORRUPT:  # in a place that was not needed to read it
            raise InputError(f"{said} Move it away or choose another output directory.") from error
        is_input = isinstance(error, OSError) and is_about_input(error)
        kind = InputError if is_input or code in _INPUT_CODES else IncompleteError
        raise kind(
            f"{said} The trials finished so far are kept. Run the same command again to resume."
        ) from error


def _primary_code(error: Exception) -> int | None:
    """Return the error code of SQLite without the details in its higher bits; None if there is none."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) and code not in _MOVED else None

"""SQLite, with its errors as sentences."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dpaudit._foreign import open_file
from dpaudit.errors import InputError

__all__ = ["DAMAGED", "connect", "is_sound", "reading", "writing"]

DAMAGED: Final = sqlite3.DatabaseError, UnicodeDecodeError  # the second where an error quotes the file

_MAGIC = b"SQLite format 3\0"
_BUSY_SECONDS = 60.0  # somebody who looks at the file while it is written


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, made if it is not there.

    The rollback journal and not a write-ahead log: it needs no shared memory, so that it works on the disks
    of clusters too, and a commit that fails on a full disk leaves the file as it was. A commit is on the disk
    when it returns, and so is the journal's end: a group of trials takes longer than that.
    """
    _require_database(path)
    with writing(path):
        if not path.exists():
            path.touch(mode=0o600)  # seeds will be in it; SQLite gives its journal the same mode
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    # damaged text must be read before it can be told that it is damaged
    connection.text_factory = lambda data: data.decode(errors="replace")
    try:
        with reading(path):
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = EXTRA")
    except BaseException:
        connection.close()
        raise
    return connection


def _require_database(path: Path) -> None:
    """SQLite takes a small file of anything else for an empty one, and writes over it."""
    with reading(path):
        start = b""
        if path.exists():
            with open_file(path) as file:
                start = file.read(len(_MAGIC))
        if start not in (b"", _MAGIC):
            raise sqlite3.DatabaseError("file is not a database")


def is_sound(connection: sqlite3.Connection) -> bool:
    """Whether the file's own structure holds."""
    try:
        found: tuple[str] = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except DAMAGED:
        return False
    return found[0] == "ok"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What cannot be read is refused, and stays as it is."""
    try:
        yield
    except (*DAMAGED, OSError) as error:
        raise InputError(
            f"Expected the trials of a run in {path}, but it cannot be read: {error}. It was left as it is; "
            "move it away, or give another output."
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written is not there; what was written before stays."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise InputError(
            f"Cannot write {path}: {error}. The trials that were finished before are kept, and the same "
            "command goes on from there."
        ) from error

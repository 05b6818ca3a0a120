"""The seal of a finished run: a manifest with the SHA-256 of every file of the run, written last.

``seal`` writes it, ``check_seal`` compares the files with it. Files of an unfinished run carry their own
checksum: :func:`with_checksum` for JSON, :class:`HashingWriter` for a checkpoint. A seal detects damage and
careless edits. Whoever edits a file can also write a new manifest, so the numbers are derived again from the
scores (``_recompute.py``), and the digest of the seal can be published with a result.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import dpaudit
from dpaudit import _io
from dpaudit._interrupts import raise_if_machine
from dpaudit._io import JsonCache, open_file, read_json
from dpaudit._provenance import digest
from dpaudit.errors import InputError

MANIFEST: Final = "manifest"
SCHEMA_VERSION = 1
CHECKSUM: Final = "checksum"  # key of a JSON file that was written by with_checksum
# the store of trials, and what a killed process leaves beside it
STORE_FILES: Final = tuple(f"trials.sqlite3{end}" for end in ("", "-journal", "-wal", "-shm"))
# files that hold seeds, which are removed before a run is published
PRIVATE_FILES: Final = ("config.json", "checkpoint.pt", *STORE_FILES)
# all files that dpaudit reads from the directory of a run; reports are made from them and not sealed
RUN_FILES: Final = (
    "config.json",
    "provenance.json",
    "canary.json",
    "checkpoint.pt",
    *STORE_FILES,
    "scores.npy",
    "present.npy",
    "with_canary.npy",
    "without_canary.npy",
    "log_likelihood_ratios.npy",
    "result.json",
)
_CHUNK = 1 << 20
_TRAILER: Final = b"\ndpaudit sha256 "  # followed by the digest of everything before it
_AGAIN = "restore it, or repeat `dpaudit run` without result.json to derive the result and a new seal"


@dataclass(frozen=True)
class Seal:
    """The digest of a manifest, sealed files that were removed since, and files that are not sealed."""

    digest: str
    absent: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()


def is_sealed(folder: Path) -> bool:
    """Return whether there is a manifest, intact or not."""
    return os.path.lexists(_manifest(folder))


def _manifest(folder: Path) -> Path:
    return folder / f"{MANIFEST}.json"


def require_no_run_file(path: Path) -> None:
    """Raise if a file that a command is asked to write is one of a run, or has the name of one in a run."""
    names = f"{MANIFEST}.json", "provenance.json"  # each run has one of them from its start
    is_run = any(os.path.lexists(path.with_name(name)) for name in names)
    if is_run and path.name in (*RUN_FILES, *names):
        raise InputError(
            f"Expected {path} not to be a file of a run, but it belongs to the run in {path.parent}, which "
            "would be damaged; choose another file."
        )


def seal(folder: Path) -> None:
    """Write the manifest atomically, after all other files of the run."""
    files = {name: _digest_of(folder / name) for name in RUN_FILES if os.path.lexists(folder / name)}
    values = {"schema_version": SCHEMA_VERSION, "dpaudit_version": dpaudit.__version__, "files": files}
    JsonCache(folder).write(MANIFEST, {**values, "seal": digest(values)})


def unseal(folder: Path) -> None:
    """Remove the manifest before anything changes: a directory without one has no finished result."""
    _io.remove(_manifest(folder))


def check_seal(folder: Path) -> Seal | None:
    """Compare all files with the manifest; return None if there is none. Raise on the first that differs."""
    if not is_sealed(folder):
        return None
    files, digest_of_manifest = _read_manifest(folder)
    absent = []
    for name in RUN_FILES:
        path = folder / name
        if name in files and name in PRIVATE_FILES and not os.path.lexists(path):
            absent.append(name)
        elif name in files:
            _require_unchanged(path, files[name])
        elif os.path.lexists(path):
            raise InputError(
                f"Expected no {name} in {folder}, because the run was sealed without it, but it was added "
                "later; remove it."
            )
    return Seal(digest_of_manifest, tuple(absent), _uncovered(folder))


def _uncovered(folder: Path) -> tuple[str, ...]:
    """Return the names of files that are neither part of a run nor reports."""
    expected = {*RUN_FILES, f"{MANIFEST}.json", "report.html", "report.md", "report.json"}
    names = (path.name for path in folder.iterdir())
    return tuple(sorted(name for name in names if name not in expected and not name.startswith(".")))


def _read_manifest(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return the digests of the files and that of the manifest itself."""
    path = _manifest(folder)
    _require_file(path)
    values = read_json(path)
    stored = values.pop("seal", None)
    files = values.get("files")
    if values.get("schema_version") not in (None, SCHEMA_VERSION):
        raise InputError(
            f"Expected schema_version={SCHEMA_VERSION} in {path}, got {values['schema_version']!a:.60}: it "
            "was written by another version of dpaudit, or damaged."
        )
    if not isinstance(files, Mapping) or "result.json" not in files or stored != digest(values):
        raise InputError(f"Expected {path} to be as the run left it, but it has changed; {_AGAIN}.")
    return files, str(stored)


def _require_unchanged(path: Path, expected: object) -> None:
    if not os.path.lexists(path):
        raise InputError(f"Expected {path}, which manifest.json lists, but it is missing; {_AGAIN}.")
    _require_file(path)
    if _digest_of(path) != expected:
        raise InputError(
            f"Expected {path} to be as the run left it, but its SHA-256 is not that in manifest.json; "
            f"{_AGAIN}."
        )


def require_files(folder: Path) -> None:
    """Raise if a file of an unfinished run is a link: the run could be finished, but its seal is refused."""
    for name in RUN_FILES:
        if os.path.lexists(folder / name):
            _require_file(folder / name, "restore it")


def _require_file(path: Path, otherwise: str = _AGAIN) -> None:
    """Raise for a link: its target can change without the directory."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "not a file"
        raise InputError(f"Expected {path} to be a file of the run, but it is {kind}; {otherwise}.")


def _digest_of(path: Path) -> str:
    hasher = hashlib.sha256()
    try:
        with open_file(path) as file:
            while piece := file.read(_CHUNK):
                hasher.update(piece)
    except OSError as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from error
    return hasher.hexdigest()


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values of a JSON file with a checksum of them.

    >>> require_checksum(Path("a.json"), with_checksum({"a": 1}))
    {'a': 1}
    """
    return {**values, CHECKSUM: digest(values)}


def require_checksum(
    path: Path, values: Mapping[str, Any], otherwise: str = "choose another output directory"
) -> dict[str, Any]:
    """Return the values without their checksum; raise if it differs or is missing."""
    content = {key: value for key, value in values.items() if key != CHECKSUM}
    if values.get(CHECKSUM) != digest(content):
        reason = "its checksum differs" if CHECKSUM in values else "it has no checksum"
        raise InputError(
            f"Expected {path} to be as the run wrote it, but {reason}; restore it or {otherwise}."
        )
    return content


class HashingWriter:
    """A file to write to, which ends with the digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Write some bytes."""
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def finish(self) -> None:
        """Append the digest."""
        self._file.write(_TRAILER + self._digest.hexdigest().encode())


def require_digest(file: BinaryIO) -> None:
    """Raise ``ValueError`` unless the file ends with the digest of everything before it."""
    length = len(_TRAILER) + 64  # digits of a SHA-256
    size = file.seek(0, os.SEEK_END) - length
    file.seek(max(size, 0))
    end = file.read(length)
    file.seek(0)
    if size < 0 or not end.startswith(_TRAILER):
        raise ValueError("there is no digest")
    hasher, left = hashlib.sha256(), size
    while piece := file.read(min(_CHUNK, left)):
        hasher.update(piece)
        left -= len(piece)
    file.seek(0)
    if hasher.hexdigest().encode() != end.removeprefix(_TRAILER):
        raise ValueError("the digest differs")


def check_unfinished(folder: Path) -> Iterator[str]:
    """Check all files that a run is resumed from; yield what is stored."""
    if not (folder / "config.json").exists():
        raise InputError(
            f"Expected {folder} to be the directory of a run, but there is neither a manifest.json nor a "
            "config.json."
        )
    require_files(folder)
    for name in ("config.json", "provenance.json", "canary.json"):
        if (folder / name).exists():
            require_checksum(folder / name, read_json(folder / name))
    if (folder / "result.json").exists():
        yield (
            "There is no manifest.json: the run was interrupted before it was sealed, or the manifest was "
            "removed. Its result.json was not checked; the same dpaudit run command computes it again from "
            "the checkpoint or the stored trials, and seals it."
        )
    if not (folder / "provenance.json").exists():
        yield "provenance.json is missing: the result will not say when the run was started."
    if (folder / "checkpoint.pt").exists():
        _require_checkpoint(folder / "checkpoint.pt")
        yield "Its checkpoint is intact."
    if (folder / "trials.sqlite3").exists():
        from dpaudit.experiments.trials._store import count_rows  # noqa: PLC0415  # of black-box audits only

        yield f"The {count_rows(folder / 'trials.sqlite3'):,} stored trials are intact."


def _require_checkpoint(path: Path) -> None:
    """Raise unless the checkpoint ends with its digest."""
    try:
        with open_file(path) as file:
            require_digest(file)
    except (OSError, ValueError) as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(
            f"Expected an intact checkpoint in {path}, but it is damaged; delete it to restart the run from "
            "its first step with the same seeds."
        ) from error

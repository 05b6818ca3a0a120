"""Check the directory of a run without its data: seal and numbers, or checksums if it is unfinished.

``dpaudit verify`` does only this; ``dpaudit run`` and ``dpaudit report`` do it before they repeat a stored
result.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

from dpaudit import _io
from dpaudit._faults import raise_if_machine
from dpaudit._io import open_file, read_json
from dpaudit.errors import InputError
from dpaudit.experiments._derivation import claimed_version, derive
from dpaudit.experiments._seal import (
    CHECKSUM,
    Seal,
    check_seal,
    is_of_version_1,
    require_checksum,
    require_files,
    unhashed_size,
)
from dpaudit.experiments._version_1 import VERSION_1, derive_version_1
from dpaudit.stats._serialization import upgraded

PROVENANCE: Final = "provenance"  # key of a result, and name of the file with the starts of a run
UNSEALED: Final = (
    "This run is not sealed, because a version of dpaudit without seals made it: only counts, bounds and "
    "verdict could be checked, by deriving them from the scores."
)


class Status(StrEnum):
    """What is known about the directory of a run."""

    SEALED = "sealed"
    """Every file is as the run left it, and counts, bounds and verdict follow from the scores."""
    UNSEALED = "unsealed"
    """The same, but without a manifest: the run was made by a version before 0.2."""
    UNFINISHED = "unfinished"
    """There is no result yet; what is stored is intact."""
    REFUSED = "refused"
    """A file has changed, or numbers do not follow from the scores."""


@dataclass(frozen=True)
class Verified:
    """The result of a finished run, whose files and numbers were checked."""

    values: dict[str, Any]
    seal: Seal | None
    remarks: tuple[str, ...]

    @property
    def digest(self) -> str | None:
        """The digest of the seal; None without one."""
        return None if self.seal is None else self.seal.digest


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The status of a directory, with verdict and seal of a finished run, or the error of a refused one."""

    directory: str
    status: Status
    verdict: str | None = None
    seal: str | None = None
    remarks: tuple[str, ...] = ()
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "status": str(self.status), "remarks": list(self.remarks)}


def verify(folder: str | Path) -> Verification:
    """Check the directory of a run; what is wrong is part of the result."""
    path = _io.expanded(folder)
    try:
        found = verify_finished(path)
        if found is not None:
            status = Status.UNSEALED if found.seal is None else Status.SEALED
            uncovered = () if found.seal is None else found.seal.uncovered
            more = (
                (f"Not part of the run, and not sealed: {', '.join(uncovered):.400}.",) if uncovered else ()
            )
            return Verification(
                directory=str(folder),
                status=status,
                verdict=found.values.get("verdict"),
                seal=found.digest,
                remarks=(*found.remarks, *more),
            )
        if (path / "result.json").exists():
            _require_no_lost_seal(path)
        remarks = tuple(_unfinished(path))
    except InputError as error:
        return Verification(directory=str(folder), status=Status.REFUSED, error=str(error))
    return Verification(directory=str(folder), status=Status.UNFINISHED, remarks=remarks)


def verify_finished(folder: Path) -> Verified | None:
    """Return the checked result of a run; None if it is unfinished, or has lost its seal.

    Such a run can be resumed: its numbers are then computed again from the checkpoint or the stored trials.
    """
    seal, path = check_seal(folder), folder / "result.json"
    if not path.exists() or (seal is None and _sign_of_seals(folder) is not None):
        return None
    values = upgraded(read_json(path))
    return Verified(values, seal, remarks_on(folder, values, seal))


def remarks_on(folder: Path, values: Mapping[str, Any], seal: Seal | None) -> tuple[str, ...]:
    """Derive a result again; return what a reader has to know, raise if it contradicts the scores."""
    if seal is None:
        _require_no_lost_seal(folder)
        return (UNSEALED, *derive_version_1(folder, values))
    derive(folder, values)
    return (f"Removed since the run was sealed: {', '.join(seal.absent)}.",) if seal.absent else ()


def _require_no_lost_seal(folder: Path) -> None:
    """Raise if a version that seals its runs has written a file of this one."""
    if (sign := _sign_of_seals(folder)) is not None:
        raise InputError(
            f"Expected manifest.json in {folder}, but it is missing, although {sign} is of a version of "
            "dpaudit that seals its runs: the run ended before it was sealed, or the manifest was removed; "
            "run the same dpaudit run command again."
        )


def _sign_of_seals(folder: Path) -> str | None:
    """Return a file that version 0.1, which had no seals, cannot have written; None if there is none."""
    if (folder / f"{PROVENANCE}.json").exists():
        return f"{PROVENANCE}.json"
    for name in ("config.json", "result.json"):
        stored = read_json(folder / name) if (folder / name).exists() else {}
        if stored and (PROVENANCE in stored or not is_of_version_1(stored)):
            return name
    version = claimed_version(folder, {})
    return None if version is None or version.startswith(VERSION_1) else "versions.json"


def _unfinished(folder: Path) -> Iterator[str]:
    """Check all files of a run without a result; yield what is stored."""
    if not (folder / "config.json").exists():
        raise InputError(
            f"Expected {folder} to be the directory of a run, but there is neither a result.json nor a "
            "config.json."
        )
    require_files(folder)
    is_old = is_of_version_1(read_json(folder / "config.json"))
    for name in ("config.json", f"{PROVENANCE}.json", "canary.json"):
        if (folder / name).exists():
            values = read_json(folder / name)
            if not (is_old and name == "canary.json" and CHECKSUM not in values):
                require_checksum(folder / name, values)
    if not is_old and not (folder / f"{PROVENANCE}.json").exists():
        yield f"{PROVENANCE}.json is missing: the result will not say when the run was started."
    if (folder / "checkpoint.pt").exists():
        yield _checkpoint(folder / "checkpoint.pt", is_old=is_old)
    if (folder / "trials.sqlite3").exists():
        from dpaudit.experiments.trials._store import count_rows  # noqa: PLC0415  # of black-box audits only

        yield f"The {count_rows(folder / 'trials.sqlite3'):,} stored trials are intact."


def _checkpoint(path: Path, *, is_old: bool) -> str:
    """Return what is known about a checkpoint; only that of a run of version 0.1 may have no checksum."""
    try:
        with open_file(path) as file:
            size = unhashed_size(file)
            if size is None:
                _require_archive(file, is_old=is_old)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise_if_machine(error, f"Cannot read {path}")
        raise InputError(
            f"Expected an intact checkpoint in {path}, but it is damaged; delete it to restart the run from "
            "its first step with the same seeds."
        ) from error
    if size is None:
        return "Its checkpoint has no checksum, because a version before 0.2 wrote it."
    return "Its checkpoint is intact."


def _require_archive(file: BinaryIO, *, is_old: bool) -> None:
    """Raise ``BadZipFile`` unless all of an archive is there, as version 0.1 wrote it."""
    if not is_old:
        raise zipfile.BadZipFile("its end is missing")
    with zipfile.ZipFile(file) as packed:
        is_whole = all(one.compress_type == zipfile.ZIP_STORED for one in packed.infolist())
        if not is_whole or packed.testzip() is not None:
            raise zipfile.BadZipFile("a part has changed")

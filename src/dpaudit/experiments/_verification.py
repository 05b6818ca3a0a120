"""Check the directory of a run without its data: seal and numbers, or checksums if it is unfinished.

``dpaudit verify`` does only this; ``dpaudit run`` and ``dpaudit report`` do it before they repeat a stored
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from dpaudit import _io
from dpaudit._faults import raise_if_machine
from dpaudit._io import open_file, read_json
from dpaudit.errors import InputError
from dpaudit.experiments._derivation import derive
from dpaudit.experiments._seal import Seal, check_seal, require_checksum, require_digest, require_files

PROVENANCE: Final = "provenance"  # key of a result, and name of the file with the starts of a run
_LOST_SEAL = "the run was interrupted before it was sealed, or the manifest was removed"


class Status(StrEnum):
    """What is known about the directory of a run."""

    SEALED = "sealed"
    """Every file is as the run left it, and counts, bounds and verdict follow from the scores."""
    UNSEALED = "unsealed"
    """There is a result, but no manifest, so it was not checked; what it can be derived from is intact."""
    UNFINISHED = "unfinished"
    """There is no result yet; what is stored is intact."""
    REFUSED = "refused"
    """A file has changed, or numbers do not follow from the scores."""


@dataclass(frozen=True)
class Verified:
    """The result of a finished run, whose files and numbers were checked."""

    values: dict[str, Any]
    seal: Seal
    remarks: tuple[str, ...]


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
        finished = verify_finished(path)
        if finished is None:
            remarks = tuple(_unfinished(path))
            status = Status.UNSEALED if (path / "result.json").exists() else Status.UNFINISHED
            return Verification(directory=str(folder), status=status, remarks=remarks)
    except InputError as error:
        return Verification(directory=str(folder), status=Status.REFUSED, error=str(error))
    seal, remarks = finished.seal, finished.remarks
    if seal.uncovered:
        remarks = (*remarks, f"Not part of the run, and not sealed: {', '.join(seal.uncovered):.400}.")
    return Verification(
        directory=str(folder),
        status=Status.SEALED,
        verdict=finished.values.get("verdict"),
        seal=seal.digest,
        remarks=remarks,
    )


def verify_finished(folder: Path) -> Verified | None:
    """Return the checked result of a sealed run; None without a seal.

    Such a run can be resumed: its numbers are then computed again from the checkpoint or the stored trials.
    """
    seal = check_seal(folder)
    if seal is None:
        return None
    values = read_json(folder / "result.json")
    return Verified(values, seal, remarks_on(folder, values, seal))


def remarks_on(folder: Path, values: Mapping[str, Any], seal: Seal | None) -> tuple[str, ...]:
    """Derive a result again; return what a reader has to know, raise if it contradicts the scores."""
    if seal is None:
        raise InputError(
            f"Expected manifest.json in {folder}, but it is missing: {_LOST_SEAL}; restore it, or repeat "
            "the dpaudit run command, which derives the result again and seals it."
        )
    derive(folder, values)
    return (f"Removed since the run was sealed: {', '.join(seal.absent)}.",) if seal.absent else ()


def _unfinished(folder: Path) -> Iterator[str]:
    """Check all files that a run is resumed from; yield what is stored."""
    if not (folder / "config.json").exists():
        raise InputError(
            f"Expected {folder} to be the directory of a run, but there is neither a manifest.json nor a "
            "config.json."
        )
    require_files(folder)
    for name in ("config.json", f"{PROVENANCE}.json", "canary.json"):
        if (folder / name).exists():
            require_checksum(folder / name, read_json(folder / name))
    if (folder / "result.json").exists():
        yield (
            f"There is no manifest.json: {_LOST_SEAL}. Its result.json was not checked; the same dpaudit run "
            "command computes it again from the checkpoint or the stored trials, and seals it."
        )
    if not (folder / f"{PROVENANCE}.json").exists():
        yield f"{PROVENANCE}.json is missing: the result will not say when the run was started."
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

"""The directory of one run: its files, their checksums, and the seal of a finished run.

:class:`RunDirectory` writes the files. The seal is a manifest with the SHA-256 of every file, written last;
``check_seal`` compares the files with it. Files of an unfinished run carry their own checksum. A seal detects
damage and careless edits. Whoever edits a file can also write a new manifest, so the numbers are derived
again from the scores (``_recompute.py``), and the digest of the seal can be published with a result.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import dpaudit
from dpaudit import _io, _provenance
from dpaudit._io import JsonCache, difference, open_file, read_json, reading
from dpaudit._provenance import digest
from dpaudit.errors import InputError
from dpaudit.experiments._analysis import RESULT_SCHEMA, SCORE_FILES, SCORES_OF_MODES

if TYPE_CHECKING:  # need pydantic and torch, which checks of a run do without
    from dpaudit.experiments._build import Resolved
    from dpaudit.experiments.config import Config

MANIFEST: Final = "manifest.json"
CHECKSUM: Final = "checksum"  # key of a JSON file that was written by with_checksum
# files that hold seeds, which are removed before a run is published
PRIVATE_FILES: Final = ("config.json", "checkpoint.pt", "trials.jsonl")
# all files that dpaudit reads from the directory of a run; reports are made from them and not sealed
RUN_FILES: Final = (
    "config.json",
    "provenance.json",
    "canary.json",
    "checkpoint.pt",
    "trials.jsonl",
    *(f"{name}.npy" for name in SCORE_FILES),
    "result.json",
)
_TRAILER: Final = b"\ndpaudit sha256 "  # followed by the digest of everything before it
_AGAIN = "restore it, or repeat `dpaudit run` without result.json to derive the result and a new seal"


class RunDirectory:
    """Files of one run, each of which is either complete or missing."""

    def __init__(self, path: str | Path) -> None:
        self.path = _io.expanded(path)
        self.checkpoint = self.path / "checkpoint.pt"
        self._json = JsonCache(self.path)  # the identity is stored separately, as the config

    def locked(self) -> AbstractContextManager[None]:
        """Lock the directory against other processes."""
        return _io.locked(self.path)

    def resolved(self, config: Config) -> dict[str, Any] | None:
        """Return the values that the run started with; None for a new run. Raise if the config differs."""
        stored = self._json.read("config")
        if stored is None:
            if (name := self._other_file("provenance.json")) is not None:  # that is written first
                raise InputError(
                    f"{self.path} is neither empty nor the directory of a run: it has {name} without a "
                    "config.json. Remove it or choose another output directory."
                )
            return None
        stored = require_checksum(self._json.path("config"), stored)
        changed = difference(stored.get("config"), config.identity())
        if changed is not None:
            raise InputError(
                f"{self.path} holds a run with another config: {changed}. Choose another output directory."
            )
        resolved = stored.get("resolved")
        return dict(resolved) if isinstance(resolved, Mapping) else {}

    def require_own_files(self, config: Config) -> None:
        """Raise if there is a file that a run of this mode does not write, since it would be sealed."""
        mode = config.audit.mode
        progress = ("canary.json", "trials.jsonl") if mode == "many-runs" else (self.checkpoint.name,)
        arrays = (f"{name}.npy" for name in SCORES_OF_MODES[mode])
        written = "config.json", "provenance.json", "result.json", MANIFEST
        if (name := self._other_file(*written, *progress, *arrays)) is not None:
            raise InputError(
                f"{self.path} has {name}, which a run of mode {mode} does not write; remove it or choose "
                "another output directory."
            )

    def start(self, config: Config, resolved: Resolved) -> None:
        """Write the provenance and the config of a new run before its first step."""
        self.note_start(is_new=True)
        values = {"config": config.identity(), "resolved": resolved.to_dict()}
        # private: it contains the seeds
        self._json.write("config", with_checksum({"schema_version": RESULT_SCHEMA, **values}), private=True)

    def note_start(self, *, is_new: bool = False) -> None:
        """Remove the seal and the result of an earlier end, and add this process to the provenance."""
        require_files(self.path)
        _io.remove(self.path / MANIFEST)  # a directory without one has no finished result
        _io.remove(self._json.path("result"))
        starts = _provenance.with_start(self._starts(), is_new=is_new)
        self._json.write("provenance", with_checksum({"starts": starts}))

    def _starts(self) -> list[Any]:
        stored = self._json.read("provenance")
        if stored is None:
            return []
        return list(require_checksum(self._json.path("provenance"), stored, "delete it").get("starts", []))

    @property
    def has_result(self) -> bool:
        """Whether there is a result, sealed or not."""
        return self._json.path("result").exists()

    def finish(
        self,
        config: Config,
        resolved: Resolved,
        arrays: Mapping[str, np.ndarray],
        result: Mapping[str, Any],
        *,
        packages: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Write the observations, then the result with its provenance, and seal them; return the result.

        ``packages`` are those that other processes of the run have imported.
        """
        for name, array in arrays.items():
            _io.write(self.path / f"{name}.npy", lambda file, array=array: np.save(file, array))  # type: ignore[misc]
        provenance = _provenance.of_run(self._starts(), resolved.digests(config), packages)
        # decides by which methods the numbers are derived again, without the config, which holds the seeds
        values = {**result, "audit": config.identity()["audit"], "provenance": provenance}
        self._json.write("result", values)
        seal(self.path)
        return values

    def replace(
        self, config: Config, resolved: Resolved, arrays: Mapping[str, np.ndarray], result: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Replace another run with a finished one; its files are removed first, the seal before others."""
        with _io.locked(self.path, is_resumed=False):
            _io.remove(self.path / MANIFEST)
            for name in reversed(RUN_FILES):  # the config, by which the run is recognized, is the last
                _io.remove(self.path / name)
            self.start(config, resolved)
            return self.finish(config, resolved, arrays, result)

    def _other_file(self, *own: str) -> str | None:
        """Return a file that has the name of one of a run, but is none of these; None if there is none."""
        others = (name for name in (*RUN_FILES, MANIFEST) if name not in own)
        return next((name for name in others if os.path.lexists(self.path / name)), None)


@dataclass(frozen=True)
class Seal:
    """The digest of a manifest, sealed files that were removed since, and files that are not sealed."""

    digest: str
    absent: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()


def is_sealed(folder: Path) -> bool:
    """Return whether there is a manifest, intact or not."""
    return os.path.lexists(folder / MANIFEST)


def require_no_run_file(path: Path) -> None:
    """Raise if a file that a command is asked to write is one of a run, or has the name of one in a run."""
    names = MANIFEST, "provenance.json"  # each run has one of them from its start
    is_run = any(os.path.lexists(path.with_name(name)) for name in names)
    if is_run and path.name in (*RUN_FILES, *names):
        raise InputError(
            f"{path} belongs to the run in {path.parent}, which would be damaged; choose another file."
        )


def seal(folder: Path) -> None:
    """Write the manifest atomically, after all other files of the run."""
    files = {name: _digest_of(folder / name) for name in RUN_FILES if os.path.lexists(folder / name)}
    values = {"schema_version": 1, "dpaudit_version": dpaudit.__version__, "files": files}
    JsonCache(folder).write("manifest", {**values, "seal": digest(values)})


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
            raise InputError(f"{name} in {folder} was added after the run was sealed; remove it.")
    return Seal(digest_of_manifest, tuple(absent), _uncovered(folder))


def _uncovered(folder: Path) -> tuple[str, ...]:
    """Return the names of files that are neither part of a run nor reports."""
    expected = {*RUN_FILES, MANIFEST, "report.html", "report.md", "report.json"}
    names = (path.name for path in folder.iterdir())
    return tuple(sorted(name for name in names if name not in expected and not name.startswith(".")))


def _read_manifest(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return the digests of the files and that of the manifest itself."""
    path = folder / MANIFEST
    _require_file(path)
    values = read_json(path)
    stored = values.pop("seal", None)
    files = values.get("files")
    if not isinstance(files, Mapping) or "result.json" not in files or stored != digest(values):
        raise InputError(f"{path} was changed after the run; {_AGAIN}.")
    return files, str(stored)


def _require_unchanged(path: Path, expected: object) -> None:
    if not os.path.lexists(path):
        raise InputError(f"{path}, which manifest.json lists, is missing; {_AGAIN}.")
    _require_file(path)
    if _digest_of(path) != expected:
        raise InputError(
            f"{path} was changed after the run: its SHA-256 is not that in manifest.json; {_AGAIN}."
        )


def require_files(folder: Path) -> None:
    """Raise if a file of an unfinished run is a link: the run could be finished, but its seal is refused."""
    for name in RUN_FILES:
        if os.path.lexists(folder / name):
            _require_file(folder / name, "restore it")


def _require_file(path: Path, otherwise: str = _AGAIN) -> None:
    """Raise for a link: its target can change without the directory."""
    with reading(path):
        mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "not a file"
        raise InputError(f"{path} must be a file of the run, but it is {kind}; {otherwise}.")


def _digest_of(path: Path) -> str:
    with reading(path), open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        raise InputError(f"{path} was changed after the run wrote it: {reason}; restore it or {otherwise}.")
    return content


def with_digest(content: bytes) -> bytes:
    """Return the content of a checkpoint, followed by its digest."""
    return content + _TRAILER + hashlib.sha256(content).hexdigest().encode()


def read_checkpoint(path: Path) -> bytes:
    """Return the content of a checkpoint without its digest; raise if that differs or is missing."""
    with reading(path), open_file(path) as file:
        whole = file.read()
    content, _, _ = whole.rpartition(_TRAILER)
    if with_digest(content) != whole:
        raise damaged_checkpoint(path)
    return content


def damaged_checkpoint(path: Path) -> InputError:
    """Return the error for a checkpoint that cannot be resumed from."""
    return InputError(
        f"The checkpoint {path} is damaged; delete it to restart the run from its first step with the same "
        "seeds."
    )


def check_unfinished(folder: Path) -> Iterator[str]:
    """Check all files that a run is resumed from; yield what is stored."""
    if not folder.exists():
        raise InputError(f"The directory {folder} does not exist.")
    if not (folder / "config.json").exists():
        raise InputError(
            f"{folder} is not the directory of a run: it has neither a manifest.json nor a config.json."
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
        read_checkpoint(folder / "checkpoint.pt")
        yield "Its checkpoint is intact."
    if (folder / "trials.jsonl").exists():
        from dpaudit.experiments.trials._store import count_rows  # noqa: PLC0415  # of black-box audits only

        yield f"The {count_rows(folder / 'trials.jsonl'):,} stored trials are intact."

"""Store of a run's trials: a file with one line of JSON per trial, appended as soon as its group ends.

Each :class:`TrialRow` has a checksum, so that a damaged line is detected and its trial is repeated. A file
that does not begin with the identity of a run is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from dpaudit import _io
from dpaudit._io import LARGEST_ARRAY, difference, open_file, reading
from dpaudit._provenance import digest
from dpaudit.errors import InputError
from dpaudit.experiments.trials._task import Finished
from dpaudit.experiments.trials._trial_plan import Group, TrialPlan

_NO_LINE: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # of ours


@contextmanager
def open_store(folder: Path, plan: TrialPlan) -> Iterator[Store]:
    """Open the store in a directory and lock the directory against other processes."""
    with _io.locked(folder):
        yield Store(folder, plan)


@dataclass(frozen=True)
class TrialRow:
    """Finished trial in the store, with a score or an error."""

    number: int
    seed: str  # 32 hexadecimal digits
    present: bool
    score: float | None
    duration: float
    host: str
    error: str | None
    attempts: int

    def to_line(self, run: str) -> bytes:
        """Return the line of the store, whose checksum depends on the digest of the ``run``."""
        values = asdict(self)
        return json.dumps({**values, "checksum": digest([run, values])}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes, run: str) -> TrialRow | None:
        """Return the trial that :meth:`to_line` wrote; None if the line is damaged."""
        try:
            values = json.loads(line)
            checksum = values.pop("checksum")
            row = cls(**values)
            return row if checksum == digest([run, values]) else None
        except _NO_LINE:
            return None


class Store:
    """Trials of one plan, one line each; a file with the trials of another plan is rejected.

    Damaged lines are dropped, so that their trials are repeated; ``remarks`` lists them. The caller must lock
    the directory, or use :func:`open_store`.
    """

    schema_version: ClassVar[int] = 3

    def __init__(self, folder: Path, plan: TrialPlan) -> None:
        self.path = folder / "trials.jsonl"
        self.scores: dict[int, float] = {}
        """Scores by trial number."""
        self.failures: dict[int, str] = {}
        """Errors of failed trials by trial number."""
        self.attempts: dict[int, int] = {}
        """Number of attempts per trial, not counting workers that died."""
        self.remarks: list[str] = []
        self._run = digest(plan.identity())
        if not self.path.exists() or not self.path.stat().st_size:
            header = {"schema_version": self.schema_version, "identity": plan.identity()}
            text = json.dumps(header, allow_nan=False) + "\n"
            _io.write_text(self.path, text, private=True)  # it contains the seed
        stored = _StoredLines.read(self.path)
        other = difference(stored.identity, json.loads(json.dumps(plan.identity())))
        if other is not None:
            raise InputError(
                f"{self.path} holds the trials of another run: {other}; choose another output directory."
            )
        for row in stored.rows:
            self._note(row)
        if stored.damaged or stored.is_torn:
            _io.write(self.path, lambda file: file.write(stored.intact), private=True)
        self.remarks += [
            f"Line {number} of the stored trials was damaged; its trial is repeated."
            for number in stored.damaged
        ]

    def write(self, group: Group, finished: Finished) -> None:
        """Append the result of a group; existing scores are not overwritten, errors are."""
        duration = finished.seconds / len(group)
        rows = [
            TrialRow(
                trial.number,
                f"{trial.seed:032x}",
                trial.present,
                score,
                duration,
                finished.host,
                error,
                1 + self.attempts.get(trial.number, 0),
            )
            for trial, score, error in zip(group, finished.scores, finished.errors, strict=True)
            if trial.number not in self.scores
        ]
        _io.append(self.path, b"".join(row.to_line(self._run) for row in rows))
        for row in rows:
            self._note(row)

    def _note(self, row: TrialRow) -> None:
        if row.number in self.scores:
            return
        self.attempts[row.number] = row.attempts
        self.failures.pop(row.number, None)
        if row.score is not None:
            self.scores[row.number] = row.score
        else:
            self.failures[row.number] = row.error or ""


@dataclass(frozen=True)
class _StoredLines:
    """The lines of a store, and the numbers of those that are damaged."""

    identity: Any
    rows: list[TrialRow]
    intact: bytes
    damaged: list[int]
    is_torn: bool
    """Whether a process was killed before it had written the last line."""

    @classmethod
    def read(cls, path: Path) -> _StoredLines:
        """Read a store; raise if it is none, and leave it unchanged."""
        with reading(path), open_file(path) as file:
            content = file.read(LARGEST_ARRAY + 1)
        header, *lines = content.splitlines(keepends=True) or [b""]
        identity, is_torn = _identity(header), not content.endswith(b"\n")
        if identity is None or len(content) > LARGEST_ARRAY:
            raise InputError(
                f"{path} does not hold the trials of a run, as this version of dpaudit writes them. The "
                "file was not changed; move it away or choose another output directory."
            )
        run = digest(identity)
        if is_torn and lines:
            lines.pop()
        rows = [(line, TrialRow.from_line(line, run)) for line in lines]
        return cls(
            identity=identity,
            rows=[row for _, row in rows if row is not None],
            intact=header.rstrip() + b"\n" + b"".join(line for line, row in rows if row is not None),
            damaged=[number for number, (_, row) in enumerate(rows, start=2) if row is None],
            is_torn=is_torn,
        )


def _identity(header: bytes) -> Any:
    """Return the identity of a run from the first line of its store; None if it is another line."""
    try:
        about = json.loads(header)
        identity, version = about["identity"], about["schema_version"]
        return identity if version == Store.schema_version and type(identity["num_trials"]) is int else None
    except _NO_LINE:
        return None


def count_rows(path: Path) -> int:
    """Return the number of trials in a store, without its plan; raise if a line is damaged."""
    stored = _StoredLines.read(path)
    for number in stored.damaged:
        raise InputError(
            f"Line {number} of {path} is damaged; run the same command again to repeat its trial."
        )
    return len({row.number for row in stored.rows})

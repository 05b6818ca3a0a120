"""One or several runs as a page, as Markdown or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _io
from dpaudit.errors import InputError
from dpaudit.report._markdown import markdown
from dpaudit.report._page import page
from dpaudit.report._read import read_run
from dpaudit.report._run import Run

SCHEMA_VERSION = 2


class Format(StrEnum):
    """What a report can be written as; the value is the ending of the file."""

    HTML = "html"
    MARKDOWN = "md"
    JSON = "json"

    @classmethod
    def of(cls, file: Path) -> Format:
        """What the name of a file says."""
        ending = file.suffix.lower().removeprefix(".")
        if ending not in list(cls):
            raise InputError(f"Expected a file that ends with .html, .md or .json, got {file.name!r}.")
        return cls(ending)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs in their order, a title, and a sentence that comes first."""

    runs: tuple[Run, ...]
    title: str
    notice: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.runs, Sequence) or not all(isinstance(run, Run) for run in self.runs):
            raise InputError(
                f"Expected runs to be a tuple of Run, as in runs=(run,), got {type(self.runs).__name__}."
            )
        if not self.runs:
            raise InputError("Expected at least one run to report, got none.")

    @classmethod
    def read(
        cls, paths: Sequence[str | Path], *, title: str | None = None, notice: str | None = None
    ) -> Report:
        """From the directories of finished runs. Runs of the same name are called by their paths."""
        names = [_io.expanded(path).resolve().name for path in paths]
        chosen = [
            name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)
        ]
        runs = tuple(read_run(path, name=name) for path, name in zip(paths, chosen, strict=True))
        return cls(runs=runs, title=title or _title(runs), notice=notice)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as :func:`schema` describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "dpaudit_version": dpaudit.__version__,
            "title": self.title,
            "notice": self.notice,
            "runs": [run.to_dict() for run in self.runs],
        }

    def to_text(self, format: Format = Format.HTML) -> str:  # noqa: A002
        """The whole report in one format."""
        if format is Format.JSON:
            return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        make = page if format is Format.HTML else markdown
        return make(self.runs, title=self.title, notice=self.notice)

    def write(self, path: str | Path, *, format: Format | None = None) -> None:  # noqa: A002
        """Into a file, as a whole or not at all; the format follows from its name, if none is given.

        A link stays, and the file that it leads to is written.
        """
        file = _io.expanded(path)
        _io.make_folder(file.parent)
        _io.write_text(_io.followed(file), self.to_text(format or Format.of(file)))


def schema(version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """The JSON Schema of :meth:`Report.to_dict`, or of the reports of an earlier version."""
    if version not in range(1, SCHEMA_VERSION + 1):
        raise InputError(f"Expected a version from 1 to {SCHEMA_VERSION}, got {version!r}.")
    name = f"report-{version}.json"
    text = (resources.files("dpaudit.report") / "schema" / name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _title(runs: Sequence[Run]) -> str:
    return f"Audit of {runs[0].name}" if len(runs) == 1 else f"Audits of {len(runs)} runs"

"""Reports of one or several runs as HTML, Markdown or JSON, as text or in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _io
from dpaudit.errors import InputError
from dpaudit.report._page import page
from dpaudit.report._read import read_run
from dpaudit.report._run import (
    COMPARISON_HEADER,
    METHODS_HEADER,
    Run,
    comparison_row,
    diagnosis_sentences,
    headline,
    method_row,
    summary,
)

SCHEMA_VERSION = 2
# what Markdown, or HTML inside it, would take for markup in a text that is not ours
_MARKUP = re.compile(r"([\\`*_{}\[\]<#|~!&])")
# what GitHub and others turn into a link
_LINK = re.compile(r"(?i)(?<=\bwww)(?=\.)|(?=://)")
# what begins a quotation, a list or a rule at the start of a text
_BLOCK = re.compile(r"^(?:(?=[>+=-])|\d+(?=[.)](?:\s|$)))")


class Format(StrEnum):
    """The formats of a report; the value is the suffix of the file."""

    HTML = "html"
    MARKDOWN = "md"
    JSON = "json"

    @classmethod
    def of(cls, file: Path) -> Format:
        """Return the format that the suffix of a file names."""
        suffix = file.suffix.lower().removeprefix(".")
        if suffix not in list(cls):
            raise InputError(f"Expected a file that ends with .html, .md or .json, got {file.name!r}.")
        return cls(suffix)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs in order, a title, and a notice that comes first."""

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
        """Read the directories of finished runs. Runs of the same name are called by their paths."""
        names = [_io.expanded(path).resolve().name for path in paths]
        runs = tuple(
            read_run(path, name=name if names.count(name) == 1 else str(path))
            for name, path in zip(names, paths, strict=True)
        )
        usual = f"Audit of {runs[0].name}" if len(runs) == 1 else f"Audits of {len(runs)} runs"
        return cls(runs=runs, title=title or usual, notice=notice)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, as :func:`schema` describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "dpaudit_version": dpaudit.__version__,
            "title": self.title,
            "notice": self.notice,
            "runs": [run.to_dict() for run in self.runs],
        }

    def to_text(self, format: Format = Format.HTML) -> str:  # noqa: A002
        """Return the report in one format."""
        if format is Format.JSON:
            return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        make = page if format is Format.HTML else _markdown
        return make(self.runs, title=self.title, notice=self.notice)

    def write(self, path: str | Path, *, format: Format | None = None) -> None:  # noqa: A002
        """Write to a file atomically; by default in the format that its name says.

        A symbolic link is kept, and its target is written.
        """
        file = _io.expanded(path)
        _io.make_folder(file.parent)
        _io.write_text(_io.followed(file), self.to_text(format or Format.of(file)))


def schema(version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """Return the JSON Schema of :meth:`Report.to_dict`, or of the reports of an earlier version."""
    if version not in range(1, SCHEMA_VERSION + 1):
        raise InputError(f"Expected a version from 1 to {SCHEMA_VERSION}, got {version!r}.")
    name = f"report-{version}.json"
    text = (resources.files("dpaudit.report") / "schema" / name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _markdown(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """Return verdicts, what they rest on, all bounds and settings, without plots."""
    parts = [f"# {_plain(title)}"]
    if notice is not None:
        parts.append(_plain(notice))
    if len(runs) > 1:
        parts.append(_table(COMPARISON_HEADER, [comparison_row(run) for run in runs]))
    for run in runs:
        parts += _section(run)
    parts.append(f"Made by dpaudit {dpaudit.__version__}.")
    return "\n\n".join(parts) + "\n"


def _section(run: Run) -> Iterator[str]:
    yield f"## {_plain(run.name)}"
    yield f"**{_plain(headline(run))}**"
    word = "" if run.verdict is None else f"{run.verdict.name}. "
    yield f"{word}{_plain(run.sentence)}"
    yield _table(("", ""), summary(run))
    lists = (
        ("Assumes", run.bound.assumptions),
        ("Not covered", run.not_covered),
        ("Notes", run.notes),
        ("Diagnostics", _diagnosis(run)),
    )
    for label, texts in lists:
        if texts:
            yield f"{label}:\n\n" + "\n".join(f"- {_plain(text)}" for text in texts)
    if run.methods:
        yield "### All methods"
        yield _table(METHODS_HEADER, [method_row(one) for one in run.methods])
    for label, lines in (
        ("The training", run.facts),
        ("Configuration", run.settings),
        ("Versions", run.versions),
    ):
        if lines:
            yield f"### {label}"
            yield _table(("", ""), list(lines.items()))


def _diagnosis(run: Run) -> list[str]:
    if run.diagnosis is None:
        return []
    found = [f"{one.name}: {one.sentence}" for one in run.diagnosis.findings]
    return [*diagnosis_sentences(run.diagnosis), *found, *run.likely_causes, *run.diagnosis.notes]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(text + ["| " + " | ".join(map(_inline, row)) + " |" for row in rows])


def _plain(text: str) -> str:
    """Escape a text for a line of its own: on one line, and never as markup, also at its beginning."""
    return _BLOCK.sub(r"\g<0>\\", _inline(text))


def _inline(text: str) -> str:
    """Escape a text inside a line. A site may still link mail addresses and names after an @."""
    return _LINK.sub(r"\\", _MARKUP.sub(r"\\\1", " ".join(text.split())))

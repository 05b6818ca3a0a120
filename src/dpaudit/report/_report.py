"""One or several runs as a report: a page, Markdown or JSON, as text and in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
    Run,
    comparison_row,
    diagnosis_sentences,
    headline,
    summary,
)
from dpaudit.report._svg import number

SCHEMA_VERSION = 2
# what Markdown or HTML in it would take for markup, in words of anybody
_MARKUP = re.compile(r"([\\`*_{}\[\]<#|~!&])")
# what GitHub and others make a link of
_LINK = re.compile(r"(?i)(?<=\bwww)(?=\.)|(?=://)")
# what begins a quotation, a list or a line, at the beginning of a text
_BLOCK = re.compile(r"^(?:(?=[>+=-])|\d+(?=[.)](?:\s|$)))")


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
        make = page if format is Format.HTML else _markdown
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


def _markdown(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """Without pictures: verdicts, what they rest on, all bounds, settings."""
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
        ("Diagnostics", () if run.diagnosis is None else _diagnosis(run)),
    )
    for label, texts in lists:
        if texts:
            yield f"{label}:\n\n" + "\n".join(f"- {_plain(text)}" for text in texts)
    if run.methods:
        yield "### All methods"
        yield _methods(run)
    for label, lines in (
        ("The training", run.facts),
        ("Configuration", run.settings),
        ("Versions", run.versions),
    ):
        if lines:
            yield f"### {label}"
            yield _lines(lines)


def _diagnosis(run: Run) -> Sequence[str]:
    assert run.diagnosis is not None
    tests = run.diagnosis
    found = [f"{one.name}: {one.sentence}" for one in tests.findings]
    return [*diagnosis_sentences(tests), *found, *run.likely_causes, *tests.notes]


def _methods(run: Run) -> str:
    header = ("method", "threshold rule", "kind", "epsilon", "for the claim")
    rows = [
        (one.name, one.bound.rule, str(one.bound.kind), number(one.epsilon), number(one.claim_epsilon))
        for one in run.methods
    ]
    return _table(header, rows)


def _lines(lines: Mapping[str, str]) -> str:
    return _table(("", ""), list(lines.items()))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(text + ["| " + " | ".join(map(_inline, row)) + " |" for row in rows])


def _plain(text: str) -> str:
    """The words, on one line and never as markup, also where they begin a line."""
    return _BLOCK.sub(r"\g<0>\\", _inline(text))


def _inline(text: str) -> str:
    """The words inside of a line. A site may still make links of mail addresses and of names after an @."""
    return _LINK.sub(r"\\", _MARKUP.sub(r"\\\1", " ".join(text.split())))

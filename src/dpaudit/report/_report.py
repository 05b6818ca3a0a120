"""Reports on one or several runs as HTML, Markdown or JSON, as text or in a file.

:func:`read_run` reads the directory of a finished run, which is untrusted: nothing in it is executed, no
pickle is loaded, and memory is bounded. The files have to be those that were sealed, and the numbers those
that follow from the scores; a value that no run writes is damage.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _io
from dpaudit._io import read_json
from dpaudit.errors import InputError
from dpaudit.experiments._analysis import RunScores
from dpaudit.experiments._directory import require_checksum, require_no_run_file
from dpaudit.experiments._recompute import as_damage, verify_finished
from dpaudit.report._page import COMPARISON_HEADER, comparison_row, facts, page, sections
from dpaudit.report._plot_data import PlotData
from dpaudit.report._run import METHODS_HEADER, Run, flattened, method_row, printable
from dpaudit.stats import Bound, Observations, TradeOff

SCHEMA_VERSION = 2
# characters that Markdown, or HTML inside it, would interpret as markup in untrusted text
_MARKUP = re.compile(r"([\\`*_{}\[\]<#|~!&])")
# what GitHub and other sites turn into a link
_LINK = re.compile(r"(?i)(?<=\bwww)(?=\.)|(?=://)")
# what would start a quotation, a list or a rule at the beginning of a line
_BLOCK = re.compile(r"^(?:(?=[>+=-])|\d+(?=[.)](?:\s|$)))")


class Format(StrEnum):
    """Formats of a report; the value is the suffix of the file."""

    HTML = "html"
    MARKDOWN = "md"
    JSON = "json"

    @classmethod
    def of(cls, file: Path) -> Format:
        """Return the format that matches the suffix of a file."""
        suffix = file.suffix.lower().removeprefix(".")
        if suffix not in list(cls):
            raise InputError(f"The file name must end in .html, .md or .json, got {file.name!r}.")
        return cls(suffix)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A title, a notice that precedes everything else, and runs in order."""

    runs: tuple[Run, ...]
    title: str
    notice: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.runs, Sequence) or not all(isinstance(run, Run) for run in self.runs):
            raise InputError(
                f"runs must be a tuple of Run, as in runs=(run,), got {type(self.runs).__name__}."
            )
        if not self.runs:
            raise InputError("There is no run to report.")

    @classmethod
    def read(
        cls, paths: Sequence[str | Path], *, title: str | None = None, notice: str | None = None
    ) -> Report:
        """Read the directories of finished runs. Runs with the same name are named by their paths."""
        names = [_io.expanded(path).resolve().name for path in paths]
        runs = tuple(
            read_run(path, name=name if names.count(name) == 1 else str(path))
            for name, path in zip(names, paths, strict=True)
        )
        usual = f"Audit of {runs[0].name}" if len(runs) == 1 else f"Audits of {len(runs)} runs"
        return cls(runs=runs, title=title or usual, notice=notice)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, as described by :func:`schema`."""
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
        """Write to a file atomically; by default in the format of its suffix.

        A symbolic link is kept, and its target is written. A file of a run is never overwritten.
        """
        file = _io.expanded(path)
        _io.make_folder(file.parent)
        target = _io.followed(file)
        require_no_run_file(target)
        _io.write_text(target, self.to_text(format or Format.of(file)))


def read_run(path: str | Path, *, name: str | None = None) -> Run:
    """Read the directory of a finished ``dpaudit run``.

    Args:
        path: The directory, also of an untrusted run: nothing in it is executed.
        name: The name in the report, by default that of the directory.

    Returns:
        The run, for a :class:`Report`.

    Raises:
        InputError: A value is invalid, a file has changed since the run was sealed, or a number does not
            follow from the scores.

    Example:
        ``Report(runs=(read_run("runs/digits"),), title="Digits").write("digits.html")``

    """
    return _read(_io.expanded(path), name, is_own=False)


def read_own_run(path: Path, *, name: str) -> Run:
    """Read a run that this process has just finished: there is no need to derive its numbers again."""
    return _read(path, name, is_own=True)


def _read(folder: Path, name: str | None, *, is_own: bool) -> Run:
    file = folder / "result.json"
    _require_finished(folder, file)
    verified = verify_finished(folder, is_own=is_own)
    if verified is None:
        _require_no_demo(folder, read_json(file))
        raise InputError(
            f"{folder} has no manifest.json: the run was interrupted before it was sealed, or the manifest "
            "was removed; restore it, or repeat the dpaudit run command, which derives the result again "
            "and seals it."
        )
    with as_damage(file):
        values: dict[str, Any] = _printable(verified.values)
        scores = RunScores.read(folder, values, values["audit"])
        observations, counted = _observations(scores)
        return Run.from_dict(
            values,
            name=printable(name or folder.resolve().name),
            settings=_settings(folder),
            remarks=verified.remarks,
            seal=verified.seal.digest,
            # canaries of one run have no order in time
            figures=_figures(scores, observations, in_order=counted != "canary"),
            counted=counted,
        )


def _require_finished(folder: Path, file: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"The directory {folder} does not exist.")
    if not file.exists():
        begun = (folder / "config.json").exists()
        reason = "resume it with dpaudit run" if begun else "it has no result.json"
        raise InputError(f"{folder} is not a finished run: {reason}.")


def _require_no_demo(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise for the directory of a demo, whose runs are in subdirectories."""
    if "schema_version" in values or "trainings" not in values:
        return
    inner = sorted(str(path.parent) for path in folder.glob("*/result.json"))
    runs = f"its runs are {', '.join(inner[:10])}" if inner else "it no longer contains any run"
    raise InputError(f"{folder} is the directory of dpaudit demo, not of a run; {runs}.")


def _printable(value: Any) -> Any:
    """Return plain values with all strings printable; JSON has no infinite numbers, but reads 1e999 as one.

    >>> _printable({"name": "a" + chr(27), "sizes": [1, 2.5]})["name"] == "a" + chr(0xFFFD)
    True
    """
    if isinstance(value, Mapping):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        raise ValueError
    return printable(value) if isinstance(value, str) else value


def _observations(scores: RunScores) -> tuple[Observations, str]:
    """Return the observations, and what each comes from: a step, a trial or a canary."""
    if scores.are_guessed:
        return Observations.from_presence(scores.arrays["scores"], scores.arrays["present"]), "canary"
    counted = {"with_canary": "trial", "log_likelihood_ratios": "canary", "scores": "step"}
    return scores.observations, next(word for name, word in counted.items() if name in scores.arrays)


def _figures(scores: RunScores, observations: Observations, *, in_order: bool) -> PlotData:
    bound, hypothesis = Bound.from_dict(scores.values["bound"]), None
    if scores.claim is not None and isinstance(bound.tradeoff, TradeOff):
        hypothesis = scores.claim.hypothesis(bound.tradeoff)
    return PlotData.of(observations, bound, hypothesis, in_order=in_order)


def _settings(folder: Path) -> dict[str, str]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    stored = require_checksum(path, read_json(path))
    with as_damage(path):
        resolved = {f"resolved.{label}": value for label, value in flattened(stored["resolved"]).items()}
        return flattened(stored["config"]) | resolved


def schema() -> dict[str, Any]:
    """Return the JSON Schema of :meth:`Report.to_dict`.

    >>> schema()["title"]
    'dpaudit report, version 2'
    """
    document: dict[str, Any] = json.loads(_io.packaged("report", "schema", f"report-{SCHEMA_VERSION}.json"))
    return document


def _markdown(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """Return verdicts with their grounds, all bounds, and settings, without plots."""
    blocks = [f"# {_plain(title)}"]
    if notice is not None:
        blocks.append(_plain(notice))
    if len(runs) > 1:
        blocks.append(_table(COMPARISON_HEADER, [comparison_row(run) for run in runs]))
    for run in runs:
        blocks += _section(run)
    blocks.append(f"Generated by dpaudit {dpaudit.__version__}.")
    return "\n\n".join(blocks) + "\n"


def _section(run: Run) -> Iterator[str]:
    yield f"## {_plain(run.name)}"
    yield f"**{_plain(f'{run.block.mark} {run.block.title}: {run.block.numbers}')}**"
    yield _plain(run.sentence)
    yield _table(("", ""), [*run.block.rows, *facts(run)])
    if run.methods:
        yield "### All methods"
        yield _table(METHODS_HEADER, [method_row(method) for method in run.methods])
    for label, lines in sections(run):
        yield f"### {label}"
        yield _table(("", ""), list(lines.items()))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(text + ["| " + " | ".join(map(_inline, row)) + " |" for row in rows])


def _plain(text: str) -> str:
    """Escape text for a line of its own, where markup at the beginning would matter too."""
    return _BLOCK.sub(r"\g<0>\\", _inline(text))


def _inline(text: str) -> str:
    """Escape text within a line. A site may still link email addresses and names after an @."""
    return _LINK.sub(r"\\", _MARKUP.sub(r"\\\1", " ".join(text.split())))

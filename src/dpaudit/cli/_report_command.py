"""``dpaudit report`` and ``dpaudit verify``: write finished runs as a page, and check their directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpaudit.cli._console import output, print_json, working
from dpaudit.cli._exit_status import BAD_INPUT, ExitStatus, printable
from dpaudit.cli._options import Json
from dpaudit.errors import InputError

if TYPE_CHECKING:  # imported when the command is called, so that the others start faster
    from dpaudit.report import Format, Report


_Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Directories of finished runs.")]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="File to write. Default: report.html, in the run's directory or, for several runs, here.",
        show_default=False,
    ),
]
_Format = Annotated[
    str | None,
    typer.Option("--format", metavar="html|md|json", help="Format. Default: from the file name, or html."),
]


def report(*, runs: _Runs, file: _Output = None, format_name: _Format = None, as_json: Json = False) -> None:
    """Write a report on finished runs, as one self-contained page.

    Exit status: 0 whatever the verdicts are, 2 bad input.
    """
    from dpaudit.report import Report  # noqa: PLC0415

    chosen = _format(format_name, file)
    target = file or _default_target(runs, chosen)
    with working(f"Reading {_count(runs)}"):
        page = Report.read(runs)
    page.write(target, format=chosen)
    for run in page.runs:
        for remark in run.remarks:
            typer.echo(f"{run.name}: {remark}", err=True)
    if as_json:
        print_json(page.to_dict())
    else:
        _print(page, target)


def _default_target(runs: list[Path], chosen: Format) -> Path:
    """Return a file in the run's or the current directory; raise for a link, since runs are untrusted."""
    target = (runs[0] if len(runs) == 1 else Path()) / f"report.{chosen}"
    if target.is_symlink():
        raise InputError(f"{target} is a link; choose a file with --output.")
    return target


def _format(name: str | None, file: Path | None) -> Format:
    from dpaudit.report import Format  # noqa: PLC0415

    if name is None:
        return Format.HTML if file is None else Format.of(file)
    if name not in list(Format):
        raise InputError(f"--format must be html, md or json, got {name!r}.")
    return Format(name)


def _print(page: Report, target: Path) -> None:
    """Print one line per run, violations first."""
    blocks = [(run.name, run.block) for run in page.runs]
    for name, block in sorted(blocks, key=lambda pair: not pair[1].title.startswith("VIOLATION")):
        line = f"{block.mark} {block.title}   {block.numbers}   {name}"
        output().print(printable(line), soft_wrap=True)
    output().print(printable(str(target)), soft_wrap=True)


_Directories = Annotated[list[Path], typer.Argument(metavar="DIR", help="Directories of runs.")]


def verify(*, runs: _Directories, as_json: Json = False) -> None:
    """Check that finished runs were not modified.

    Compares every file with the manifest, and computes bounds and verdict again
    from the stored scores.

    Exit status: 0 if all runs are intact, whatever their verdicts; 2 if a run
    was modified, is unfinished or has no seal.
    """
    from dpaudit.experiments import _recompute  # noqa: PLC0415

    with working(f"Checking {_count(runs)}"):
        entries = [_recompute.verify(path).to_dict() for path in runs]
    is_accepted = all(entry["status"] == "sealed" for entry in entries)
    if as_json:
        print_json({"accepted": is_accepted, "runs": entries})
    else:
        for entry in entries:
            _print_verified(entry)
    if not is_accepted:
        raise ExitStatus(BAD_INPUT)


def _print_verified(entry: dict[str, Any]) -> None:
    """Print the status of a run, and the sentences that belong to it."""
    words = [entry["status"]]
    if entry["seal"] is not None or entry["verdict"] is not None:
        words.append((entry["verdict"] or "no claim").replace("_", " "))
    words += [] if entry["seal"] is None else [f"seal {entry['seal']}"]
    sentences = [f"  {text}" for text in (entry["error"], *entry["remarks"]) if text is not None]
    for text in (f"{entry['directory']}: {', '.join(words)}", *sentences):
        output().print(printable(text), soft_wrap=True)


def _count(runs: list[Path]) -> str:
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"

"""``dpaudit demo``: what an audit says of a correct training and of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpaudit._files import make_folder, write_text
from dpaudit.cli._console import output, print_json
from dpaudit.cli._demonstration import NOTICE, Demo, demonstrate
from dpaudit.cli._options import Json
from dpaudit.cli._progress import Watching
from dpaudit.cli._scores_table import model_and_steps, print_result, tests_of_noise

if TYPE_CHECKING:  # imported when the command is called
    from dpaudit.report import Report

__all__ = ["demo"]

_Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Where the report and the runs go.")]


def demo(*, folder: _Output = Path("dpaudit-demo"), as_json: Json = False) -> None:
    """Train and audit a correct DP-SGD and a twin with too little noise.

    Writes a report of both; the last line is its path.

    Exit status 0 if the audits tell them apart.
    """
    from dpaudit.experiments import use_one_thread  # noqa: PLC0415  # loads torch, or says that it is missing

    use_one_thread()
    make_folder(folder)
    with Watching() as watching:
        found = demonstrate(folder, watching.say, watching)
        watching.say("Writing the report")
        made = _report(found)
    values = found.to_dict()
    write_text(folder / "result.json", json.dumps(values, indent=2, allow_nan=False) + "\n")
    for name in ("report.md", "report.html"):
        made.write(folder / name)
    if as_json:
        print_json(values)
    else:
        _print(found, folder)
    if not found.is_as_expected:
        raise typer.Exit(1)


def _print(found: Demo, folder: Path) -> None:
    console = output()
    console.print(NOTICE)
    for training in found.trainings:
        console.print()
        console.print(f"{training.name.capitalize()}:", style="bold")
        print_result(console, training.values, model_and_steps(training.values))
        console.print(tests_of_noise(training.values))
    console.print()
    console.print(_conclusion(found))
    console.print("The report of both, a page to open in a browser:")
    console.print(str(folder / "report.html"), soft_wrap=True)


def _conclusion(found: Demo) -> str:
    if found.is_as_expected:
        return "Both verdicts are as expected."
    wrong = " and ".join(training.name for training in found.trainings if not training.is_as_expected)
    return f"The verdict on {wrong} is not as expected."


def _report(found: Demo) -> Report:
    from dpaudit.report import Report, read_run  # noqa: PLC0415

    runs = tuple(read_run(one.folder, name=one.name.capitalize()) for one in found.trainings)
    return Report(runs=runs, title="The audits of the demo", notice=f"{NOTICE} {_conclusion(found)}")

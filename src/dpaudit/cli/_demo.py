"""``dpaudit demo``: what an audit says of a correct training and of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpaudit.cli._console import output, print_json, working
from dpaudit.cli._options import Json
from dpaudit.cli._paths import make_folder, write_text
from dpaudit.cli._scores_table import print_result
from dpaudit.cli._simulated import NOTICE, Demo, simulate

__all__ = ["demo"]

_Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Where report.md and result.json go.")]


def demo(*, folder: _Output = Path("dpaudit-demo"), as_json: Json = False) -> None:
    """Audit a correct training and a twin with too little noise, from simulated scores.

    Exit status 0 if the audits tell them apart.
    """
    make_folder(folder)
    with working("Auditing two simulated trainings"):
        found = simulate()
        values = found.to_dict()
    write_text(folder / "result.json", json.dumps(values, indent=2, allow_nan=False) + "\n")
    write_text(folder / "report.md", _report(found))
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
        print_result(console, training.result)
    console.print()
    console.print(_conclusion(found))
    console.print(f"Written: {folder / 'report.md'} and {folder / 'result.json'}", soft_wrap=True)


def _conclusion(found: Demo) -> str:
    if found.is_as_expected:
        return "Both verdicts are as expected."
    wrong = " and ".join(training.name for training in found.trainings if not training.is_as_expected)
    return f"The verdict on {wrong} is not as expected."


def _report(found: Demo) -> str:
    parts = [f"# dpaudit demo\n\n{NOTICE}\n"]
    for training in found.trainings:
        result = training.result
        assumptions = "\n".join(f"- {text}" for text in result.bound.assumptions)
        parts.append(
            f"## {training.name.capitalize()}\n\n"
            f"| | |\n|---|---|\n"
            f"| verdict | {result.verdict.name}. {result.sentence} |\n"
            f"| claim | {result.claim.summary} |\n"
            f"| bound | {result.bound.statement} |\n"
            f"| method | {result.bound.tradeoff} + {result.bound.method} + {result.bound.rule} |\n"
            f"| power | {result.power} |\n\n"
            f"Assumes:\n\n{assumptions}\n"
        )
    return "\n".join([*parts, _conclusion(found) + "\n"])

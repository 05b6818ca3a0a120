"""``dpaudit demo``: what an audit says of a correct training and of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpaudit._files import make_folder, write_text
from dpaudit.cli._console import output, print_json
from dpaudit.cli._demonstration import NOTICE, Audited, Demo, demonstrate
from dpaudit.cli._options import Json
from dpaudit.cli._progress import Watching
from dpaudit.cli._scores_table import model_and_steps, power, print_result

__all__ = ["demo"]

_Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Where report.md and result.json go.")]


def demo(*, folder: _Output = Path("dpaudit-demo"), as_json: Json = False) -> None:
    """Train and audit a correct DP-SGD and a twin with too little noise.

    Exit status 0 if the audits tell them apart.
    """
    make_folder(folder)
    with Watching() as watching:
        found = demonstrate(watching.say, watching)
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
        print_result(console, training.values, model_and_steps(training.values))
    console.print()
    console.print(_conclusion(found))
    console.print(f"Written: {folder / 'report.md'} and {folder / 'result.json'}", soft_wrap=True)


def _conclusion(found: Demo) -> str:
    if found.is_as_expected:
        return "Both verdicts are as expected."
    wrong = " and ".join(training.name for training in found.trainings if not training.is_as_expected)
    return f"The verdict on {wrong} is not as expected."


def _report(found: Demo) -> str:
    parts = [f"# dpaudit demo\n\n{NOTICE}\n", *map(_section, found.trainings)]
    return "\n".join([*parts, _conclusion(found) + "\n"])


def _section(training: Audited) -> str:
    values, bound = training.values, training.values["bound"]
    rows = [
        ("verdict", f"{values['verdict']}. {values['sentence']}"),
        ("claim", values["claim"]["summary"]),
        ("bound", bound["statement"]),
        ("method", f"{bound['tradeoff']} + {bound['inference']} + {bound['threshold_rule']}"),
        ("power", str(power(values))),
        *model_and_steps(values),
    ]
    table = "\n".join(f"| {label} | {text} |" for label, text in rows)
    assumptions = "\n".join(f"- {text}" for text in bound["assumptions"])
    return f"## {training.name.capitalize()}\n\n| | |\n|---|---|\n{table}\n\nAssumes:\n\n{assumptions}\n"

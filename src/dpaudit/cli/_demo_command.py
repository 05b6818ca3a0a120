"""``dpaudit demo``: audit a correct training run and a twin with too little noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from dpaudit.cli import _options as opt
from dpaudit.cli._console import ProgressDisplay, output, print_json, print_rows
from dpaudit.cli._exit_status import ExitStatus, printable

if TYPE_CHECKING:  # need torch, or are slow to load: imported when the command is called
    from dpaudit.cli._result_table import Shown
    from dpaudit.experiments import Progress
    from dpaudit.report import Report


_FACTOR = 0.8
_CHANGES = ("seed=20230215",)
_INTRODUCTION = "Training the same model twice with DP-SGD. Both claim epsilon 8 at delta 1e-05."
NOTICE = (
    "A small network is trained twice on handwritten digits, with DP-SGD at a claimed epsilon of 8 and 512 "
    "canaries in every step. The second run has a bug: its noise is 80 % of the claimed noise."
)


@dataclass(frozen=True)
class DemoTraining:
    """One training run of the demo, and the result of its audit."""

    name: str
    folder: Path
    noise_factor: float
    expected: str
    values: dict[str, Any]

    @property
    def is_as_expected(self) -> bool:
        """Whether the verdict is the one known to be correct."""
        return bool(self.values["verdict"] == self.expected)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "name": self.name,
            "folder": self.folder.name,
            "noise_factor": self.noise_factor,
            "expected": self.expected,
            "as_expected": self.is_as_expected,
            **self.values,
        }


def demonstrate(
    folder: Path, say: Callable[[str], None], watch: Callable[[Progress], None]
) -> list[DemoTraining]:
    """Train both models with the same claim, one after the other, each in its own directory."""
    from dpaudit import experiments  # noqa: PLC0415  # loads torch

    little_noise = "training.fault.name=noise-too-small", f"training.fault.factor={_FACTOR}"
    trainings = []
    for name, subfolder, factor, fault, expected in (
        ("correct", "correct", 1.0, (), "NO_VIOLATION"),
        ("20 % less noise", "too-little-noise", _FACTOR, little_noise, "VIOLATION"),
    ):
        say(f"Training: {name}")
        changes = f"output={json.dumps(str(folder / subfolder))}", *_CHANGES, *fault
        config = experiments.parse_config(experiments.example("digits"), "the demo's config", changes)
        values = experiments.rehearse(config, watch=watch, keep=True)
        trainings.append(DemoTraining(name, folder / subfolder, factor, expected, values))
    return trainings


_Output = Annotated[
    Path, typer.Option("--output", metavar="DIR", help="Directory for the report and both runs.")
]


def demo(
    *,
    folder: _Output = Path("dpaudit-demo"),
    verbose: opt.Verbose = False,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Train a correct and a broken model, and audit both.

    Writes both runs and a report.

    Exit status: 0 if both verdicts are as expected, 1 if not, 2 bad input.
    """
    from dpaudit._io import make_folder, write_text  # noqa: PLC0415  # loads numpy
    from dpaudit.experiments import use_one_thread  # noqa: PLC0415  # loads torch, or raises if it is missing
    from dpaudit.experiments._directory import require_no_run_file  # noqa: PLC0415

    use_one_thread()
    make_folder(folder)
    require_no_run_file(folder / "result.json")
    with ProgressDisplay() as display:
        trainings = demonstrate(folder, display.say, display)
        display.say("Writing the report")
        report = _report(trainings)
    is_as_expected = all(training.is_as_expected for training in trainings)
    entries = [training.to_dict() for training in trainings]
    values = {"notice": NOTICE, "as_expected": is_as_expected, "trainings": entries}
    write_text(folder / "result.json", json.dumps(values, indent=2, allow_nan=False) + "\n")
    for name in ("report.md", "report.html"):
        report.write(folder / name)
    if as_json:
        print_json(values)
    else:
        from dpaudit.cli._result_table import Shown  # noqa: PLC0415

        _print(trainings, folder, Shown(verbose, quiet))
    if not is_as_expected:
        raise ExitStatus(1)


def _print(trainings: list[DemoTraining], folder: Path, shown: Shown) -> None:
    from dpaudit import _validate  # noqa: PLC0415  # loads numpy
    from dpaudit.cli._result_table import print_details  # noqa: PLC0415
    from dpaudit.stats import Block  # noqa: PLC0415

    console, blocks = output(), [Block.of(training.values) for training in trainings]
    console.print(f"{_INTRODUCTION}\n\n{'':<21}accuracy   epsilon >=   verdict")
    for training, block in zip(trainings, blocks, strict=True):
        epsilon = _validate.rounded_down(float(training.values["bound"]["epsilon"]))
        numbers = f"  {training.name:<17}  {100 * training.values['accuracy']:>6.1f} %   {epsilon:>10}   "
        style = "bold red" if training.values["verdict"] == "VIOLATION" else ""
        console.print(Text.assemble(numbers, (f"{block.mark} {block.title}", style)))
    if shown.quiet:
        return
    for training, block in zip(trainings, blocks, strict=True):
        rows = [row for row in block.rows if row[0] in ("finding", "cause")]
        if rows:
            console.print()
            print_rows(console, rows)
        if shown.verbose:
            console.print(f"\n{training.name}", style="bold")
            print_details(console, training.values)
    console.print(f"\n{_conclusion(trainings)}\n")
    console.print(printable(f"Report  {folder / 'report.html'}"), soft_wrap=True)
    console.print("Next    audit your own loop: docs/quickstart.md")


def _conclusion(trainings: list[DemoTraining]) -> str:
    from dpaudit import _validate  # noqa: PLC0415  # loads numpy

    wrong = ", ".join(training.name for training in trainings if not training.is_as_expected)
    if wrong:
        return f"Unexpected verdict: {wrong}."
    correct, broken = (training.values for training in trainings)
    bound, tests = broken["bound"]["confidence"], broken["diagnosis"]["confidence"]
    accuracy = "improves" if broken["accuracy"] > correct["accuracy"] else "hardly changes"
    return (
        f"The bug {accuracy} accuracy and shows in no training curve. dpaudit refuted the claim with "
        f"{_validate.percent(round(bound + tests - 1, 12))} confidence."
    )


def _report(trainings: list[DemoTraining]) -> Report:
    from dpaudit.report import Report, read_own_run  # noqa: PLC0415

    runs = tuple(read_own_run(training.folder, name=training.name.capitalize()) for training in trainings)
    return Report(runs=runs, title="The dpaudit demo", notice=f"{NOTICE} {_conclusion(trainings)}")

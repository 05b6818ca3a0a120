"""``dpaudit demo``: audit a correct training run and a twin with too little noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpaudit._io import make_folder, write_text
from dpaudit.cli._console import ProgressDisplay, output, print_json
from dpaudit.cli._exit_status import ExitStatus, printable
from dpaudit.cli._options import Json
from dpaudit.cli._result_table import model_and_steps, print_result, tests_of_noise
from dpaudit.stats import Verdict

if TYPE_CHECKING:  # need torch, or are slow to load: imported when the command is called
    from dpaudit.experiments import Progress
    from dpaudit.report import Report


_FACTOR = 0.8
_CHANGES = ("seed=20230215",)
NOTICE = (
    "A small network is trained twice on handwritten digits, with DP-SGD at a claimed epsilon of 8 and 512 "
    "canaries in every step. The second run has a bug: its noise is 0.8 times what it should be."
)


@dataclass(frozen=True)
class DemoTraining:
    """One training run of the demo, and the result of its audit."""

    name: str
    folder: Path
    noise_factor: float
    expected: Verdict
    values: dict[str, Any]

    @property
    def is_as_expected(self) -> bool:
        """Whether the verdict is the one known to be correct."""
        return Verdict[self.values["verdict"]] is self.expected

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "name": self.name,
            "folder": self.folder.name,
            "noise_factor": self.noise_factor,
            "expected": self.expected.name,
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
        ("correct run", "correct", 1.0, (), Verdict.NO_VIOLATION),
        ("twin with 0.8 times the noise", "too-little-noise", _FACTOR, little_noise, Verdict.VIOLATION),
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


def demo(*, folder: _Output = Path("dpaudit-demo"), as_json: Json = False) -> None:
    """Train and audit a correct DP-SGD run and a twin with too little noise.

    Writes a report on both runs; the last line printed is its path.

    Exit status: 0 if both verdicts are as expected, 1 if not, 2 for bad input.
    """
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
        _print(trainings, folder)
    if not is_as_expected:
        raise ExitStatus(1)


def _print(trainings: list[DemoTraining], folder: Path) -> None:
    console = output()
    console.print(NOTICE)
    for training in trainings:
        console.print()
        console.print(f"{training.name.capitalize()}:", style="bold")
        print_result(console, training.values, model_and_steps(training.values))
        console.print(tests_of_noise(training.values))
    console.print()
    console.print(_conclusion(trainings))
    console.print("Report on both runs, to open in a browser:")
    console.print(printable(str(folder / "report.html")), soft_wrap=True)


def _conclusion(trainings: list[DemoTraining]) -> str:
    wrong = ", ".join(training.name for training in trainings if not training.is_as_expected)
    return f"Unexpected verdict: {wrong}." if wrong else "Both verdicts are as expected."


def _report(trainings: list[DemoTraining]) -> Report:
    from dpaudit.report import Report  # noqa: PLC0415
    from dpaudit.report._report import read_own_run  # noqa: PLC0415

    runs = tuple(read_own_run(training.folder, name=training.name.capitalize()) for training in trainings)
    return Report(runs=runs, title="The dpaudit demo", notice=f"{NOTICE} {_conclusion(trainings)}")

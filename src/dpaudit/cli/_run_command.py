"""``dpaudit run``: train and audit as specified by a config file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.errors import NotRenderableError

from dpaudit.cli import _options as opt
from dpaudit.cli._console import EXIT_STATUS, ProgressDisplay, output, print_json
from dpaudit.cli._exit_status import ExitStatus, printable
from dpaudit.errors import InputError

if TYPE_CHECKING:  # need torch, which is imported when the command is called
    from dpaudit.experiments import Config, Outcome


# what printing raises if a value is missing or has another type; an InputError is a ValueError
_DAMAGED = AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, NotRenderableError

_File = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="Config file (TOML).", show_default=False)
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value of the config, such as training.num_steps=50. Repeatable.",
    ),
]
_Example = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Print an example config: digits, paper-cifar10, end-to-end, purchase, input, black-box, "
        "black-box-one-run or black-box-function.",
    ),
]


_Retry = Annotated[
    bool,
    typer.Option(
        "--retry-failed",
        help="Train failed models again. Sound only if the seed determines all randomness.",
    ),
]


def run(
    *,
    config: _File = None,
    changes: _Set = None,
    example: _Example = None,
    retry_failed: _Retry = False,
    verbose: opt.Verbose = False,
    quiet: opt.Quiet = False,
    all_methods: opt.AllMethods = False,
    as_json: opt.Json = False,
) -> None:
    """Train with DP-SGD and audit the run, as a config file describes.

    Writes all files to the output directory that the config names. If the run
    is interrupted, the same command resumes it.

    Exit status: 0 no violation, 1 violation, 2 bad input, 3 underpowered,
    4 not completed, 130 interrupted.
    """
    from dpaudit import experiments  # noqa: PLC0415  # loads torch

    if example is not None:
        typer.echo(experiments.example(example), nl=False)
        return
    if config is None:
        raise InputError("A config file is missing; print an example with: dpaudit run --example digits")
    loaded = experiments.load_config(config, changes or ())
    outcome = _run(loaded, retry_failed=retry_failed)
    if outcome.was_finished:
        _require_intact(loaded, outcome)
    shown = verbose, quiet, all_methods
    if as_json:
        print_json({**outcome.values, "seal": outcome.seal, "remarks": list(outcome.remarks)})
    else:
        _print(output(), loaded, outcome, *shown)
    verdict = outcome.values["verdict"]  # None without a claim
    raise ExitStatus(0 if verdict is None else EXIT_STATUS[verdict])


def _require_intact(config: Config, outcome: Outcome) -> None:
    """Raise unless the terminal can print all of a stored result; its numbers were derived again."""
    text = io.StringIO()
    try:
        _print(Console(file=text, width=1000), config, outcome, True)
        is_intact = printable(text.getvalue()) == text.getvalue()
    except _DAMAGED:
        is_intact = False
    if not is_intact:
        raise InputError(
            f"{Path(config.output) / 'result.json'} is damaged; delete it and run the same command again to "
            "recreate it."
        )


def _run(config: Config, *, retry_failed: bool) -> Outcome:
    from dpaudit import experiments  # noqa: PLC0415  # loads torch

    experiments.use_one_thread()
    with ProgressDisplay() as display:
        setting = f"{config.model.name} on {config.data.name}, audit mode {config.audit.mode}"
        display.say(f"{setting}, in {printable(config.output)}")
        with display.resumable(lambda: None if display.position is None else f" at {display.position}"):
            outcome = experiments.run(
                config,
                watch=display,
                say=display.say,
                crafting=display.crafting,
                trials=display.trials,
                retry_failed=retry_failed,
            )
        if outcome.was_finished:
            display.say("This run is already finished; its stored result follows.")
    return outcome


def _print(console: Console, config: Config, outcome: Outcome, *options: bool) -> None:
    from dpaudit.cli._result_table import Shown, print_examined  # noqa: PLC0415

    shown = Shown(*options)
    print_examined(console, outcome.values, shown)
    if shown.quiet:
        return
    console.print()
    for remark in outcome.remarks:
        console.print(f"Note: {remark}", soft_wrap=True)
    console.print(printable(f"Written: {config.output}"), soft_wrap=True)

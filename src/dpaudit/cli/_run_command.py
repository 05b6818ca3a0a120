"""``dpaudit run``: train and audit what a config file says."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.errors import NotRenderableError

from dpaudit.cli._console import output, print_json, status
from dpaudit.cli._options import Json
from dpaudit.cli._progress import ProgressDisplay
from dpaudit.cli._result_table import model_and_steps, print_examined, tests_of_noise
from dpaudit.errors import InputError
from dpaudit.stats import Verdict

if TYPE_CHECKING:  # they need torch, which is imported when the command is called
    from dpaudit.experiments import Config, Outcome


_DAMAGED = AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, NotRenderableError

_File = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A TOML file.", show_default=False)]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the file: training.num_steps=50"),
]
_Example = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Print a config to start from: digits, paper-cifar10, end-to-end, purchase, input, black-box, "
        "black-box-one-run, black-box-function.",
    ),
]


_Retry = Annotated[
    bool,
    typer.Option(
        "--retry-failed",
        help="Try trainings again that have failed: sound only if all their chance comes from their seed.",
    ),
]


def run(
    *,
    config: _File = None,
    changes: _Set = None,
    example: _Example = None,
    retry_failed: _Retry = False,
    as_json: Json = False,
) -> None:
    """Train with DP-SGD and audit it, as a config file says.

    Everything goes into the config's output directory. Called again, it goes
    on where it was interrupted.

    Exit status: 0 no violation, 1 violation, 2 bad input, 3 underpowered,
    130 interrupted.
    """
    from dpaudit import experiments  # noqa: PLC0415  # loads torch

    if example is not None:
        typer.echo(experiments.example(example), nl=False)
        return
    if config is None:
        raise InputError("Expected a config; print one to start from with: dpaudit run --example digits")
    loaded = experiments.load_config(config, changes or ())
    found = _run(loaded, retry_failed=retry_failed)
    if found.was_finished:
        _require_whole(loaded, found)
    if as_json:
        print_json(found.values)
    else:
        _print(output(), loaded, found)
    raise typer.Exit(_status(found))


def _status(found: Outcome) -> int:
    verdict = found.values["verdict"]  # none where nothing is claimed
    return 0 if verdict is None else status(Verdict[verdict])


def _require_whole(config: Config, found: Outcome) -> None:
    """A result that was read is shown to nobody first: a file that was changed ends in a sentence."""
    page = io.StringIO()
    try:
        _print(Console(file=page, width=1000), config, found)
        _status(found)
        whole = all(one.isprintable() or one == "\n" for one in page.getvalue())
    except _DAMAGED:
        whole = False
    if not whole:
        raise InputError(
            f"Expected the result of a run in {Path(config.output) / 'result.json'}, but it is damaged; "
            "delete it, and the same command makes it again."
        )


def _run(config: Config, *, retry_failed: bool) -> Outcome:
    from dpaudit import experiments  # noqa: PLC0415  # loads torch

    experiments.use_one_thread()
    with ProgressDisplay() as display:
        display.say(
            f"{config.model.name} on {config.data.name}, audited by {config.audit.mode}, in {config.output}"
        )
        with display.resumable(lambda: None if display.place is None else f" at {display.place}"):
            found = experiments.run(
                config,
                watch=display,
                say=display.say,
                crafting=display.crafting,
                trials=display.trials,
                retry_failed=retry_failed,
            )
        if found.was_finished:
            display.say("This run is finished; here is its result again.")
    return found


def _print(console: Console, config: Config, found: Outcome) -> None:
    print_examined(console, found.values, more=model_and_steps(found.values))
    console.print()
    console.print(tests_of_noise(found.values))
    console.print()
    console.print(f"Written: {config.output}", soft_wrap=True)

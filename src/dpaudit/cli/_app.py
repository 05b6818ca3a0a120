"""The application with all commands, and ``dpaudit completion``, which prints a shell completion script."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from dpaudit.cli._check_command import check, explain
from dpaudit.cli._console import DecidingCommand, SentenceErrorGroup, dpaudit_command, print_json
from dpaudit.cli._demo_command import demo
from dpaudit.cli._options import Json
from dpaudit.cli._plan_command import plan
from dpaudit.cli._report_command import report, verify
from dpaudit.cli._reproduce_command import reproduce
from dpaudit.cli._run_command import run
from dpaudit.cli._scores_command import scores
from dpaudit.cli._zoo_command import zoo

_COMPLETE_VAR = "_DPAUDIT_COMPLETE"  # set by the completion script


class Shell(StrEnum):
    """Shells with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_Shell = Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)]


def completion(*, shell: _Shell, as_json: Json = False) -> None:
    """Print a shell completion script.

    For bash, add this line to ~/.bashrc: source <(dpaudit completion bash)
    """
    script = get_completion_script(prog_name="dpaudit", complete_var=_COMPLETE_VAR, shell=shell.value)
    if as_json:
        print_json({"shell": shell.value, "script": script})
    else:
        typer.echo(script)


if _COMPLETE_VAR in os.environ:
    completion_init()
app = typer.Typer(
    cls=SentenceErrorGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Audit": (run, scores, check, plan),
    "Results": (explain, report, verify),
    "Examples": (demo, zoo, reproduce),
    "Shell": (completion,),
}
for group, commands in _GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group, cls=DecidingCommand)(command)
app.callback(invoke_without_command=True)(dpaudit_command)

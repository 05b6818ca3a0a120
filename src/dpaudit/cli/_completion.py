"""``dpaudit completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from dpaudit.cli._console import print_json
from dpaudit.cli._options import Json

__all__ = ["completion", "prepare_completion"]

_PROGRAM = "dpaudit"
_QUESTION = "_DPAUDIT_COMPLETE"  # set by the script when the shell asks


class Shell(StrEnum):
    """Those that have a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_Shell = Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)]


def completion(*, shell: _Shell, as_json: Json = False) -> None:
    """Print the script that lets a shell complete commands and options.

    For bash, put this line into ~/.bashrc: source <(dpaudit completion bash)
    """
    script = get_completion_script(prog_name=_PROGRAM, complete_var=_QUESTION, shell=shell.value)
    if as_json:
        print_json({"shell": shell.value, "script": script})
    else:
        typer.echo(script)


def prepare_completion() -> None:
    """Have the question of a shell answered in the words of its script."""
    if _QUESTION in os.environ:
        completion_init()

"""How a command ends: its exit status, and mistakes as one sentence on standard error."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from dpaudit.errors import DpauditError
from dpaudit.stats import Verdict

__all__ = ["BAD_INPUT", "INTERRUPTED", "UNDERPOWERED", "Sentences", "status"]

BAD_INPUT: Final = 2  # typer's own usage errors have it too
UNDERPOWERED: Final = 3
INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141

_STATUS = {Verdict.NO_VIOLATION: 0, Verdict.VIOLATION: 1, Verdict.UNDERPOWERED: UNDERPOWERED}


def status(verdict: Verdict) -> int:
    """The exit status of a verdict."""
    return _STATUS[verdict]


def _printable(text: str) -> str:
    """A file may hold what moves the cursor or changes colours, and a sentence may quote it."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


class Sentences(TyperGroup):
    """Commands whose mistakes end in a sentence instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DpauditError as error:
            typer.echo(f"dpaudit: {_printable(str(error))}", err=True)
            raise typer.Exit(BAD_INPUT) from error
        except MemoryError as error:
            typer.echo("dpaudit: There is not enough memory for these scores.", err=True)
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # the reader left; status 1, the usual one, would say that a claim was violated
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_BROKEN_PIPE) from error

"""How a command ends: its exit status, and mistakes as one sentence on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer
from typer.core import TyperGroup

from dpaudit.errors import DpauditError
from dpaudit.stats import Verdict

__all__ = ["BAD_INPUT", "INTERRUPTED", "UNDERPOWERED", "Sentences", "status"]

BAD_INPUT: Final = 2
UNDERPOWERED: Final = 3
INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141

_UsageError: Any = typer.BadParameter.__base__  # typer has no name of its own for it
_STATUS = {Verdict.NO_VIOLATION: 0, Verdict.VIOLATION: 1, Verdict.UNDERPOWERED: UNDERPOWERED}


def status(verdict: Verdict) -> int:
    """The exit status of a verdict."""
    return _STATUS[verdict]


def _printable(text: str) -> str:
    """A file may hold what moves the cursor or changes colours, and a sentence may quote it."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


class Sentences(TyperGroup):
    """Commands whose mistakes end in a sentence instead of a traceback."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        with _sentences():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _sentences(ctx):
            return super().invoke(ctx)


@contextmanager
def _sentences(ctx: Any = None) -> Iterator[None]:
    try:
        yield
    except DpauditError as error:
        raise _refused(str(error)) from error
    except _UsageError as error:
        raise _refused(_usage(error, ctx)) from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):  # as torch says it
            raise
        raise _refused("There is not enough memory for that.") from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        # the reader left; status 1, the usual one, would say that a claim was violated
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from error
    except OSError as error:
        place = error.filename or "standard output"
        raise _refused(f"Cannot read or write {place}: {error.strerror or error}.") from error


def _refused(sentence: str) -> typer.Exit:
    typer.echo(f"dpaudit: {_printable(sentence)}", err=True)
    return typer.Exit(BAD_INPUT)


def _usage(error: Any, ctx: Any) -> str:
    """What typer says of the words that it was given, and where to read on."""
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    if error.ctx is not None:
        return f"{text}{'' if text.endswith('?') else '.'} See: {error.ctx.command_path} --help"
    if ctx is None or ctx.invoked_subcommand is None:
        return f"{text}. See: dpaudit --help"
    return f"{text}.{_about(error, ctx)} See: {ctx.command_path} {ctx.invoked_subcommand} --help"


def _about(error: Any, ctx: Any) -> str:
    """What the help says of an option that lacks its value: it may name the values that there are."""
    name, command = getattr(error, "option_name", None), ctx.command.get_command(ctx, ctx.invoked_subcommand)
    found = [option.help for option in command.params if name in option.opts and option.help]
    return f" {found[0].rstrip('.')}." if found else ""

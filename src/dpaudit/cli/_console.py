"""What commands print and how they end.

Results go to standard output, what takes long is said on standard error. A mistake of the user ends in one
sentence and an exit status, never in a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from dpaudit.errors import DpauditError
from dpaudit.stats import Verdict

_GAP = 2  # spaces between the columns of a table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output() -> Console:
    """Standard output; square brackets are text."""
    return _Console(highlight=False, markup=False, emoji=False)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_labelled(console: Console, rows: Sequence[tuple[str, str | Text]]) -> None:
    """Lines with a label each; what does not fit goes on under its own line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    console.print(grid)


def slim_table(*left: str) -> Table:
    """A table of few lines whose first columns are text; as narrow as its cells, two spaces apart."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """A page that is too narrow gets a block for each row: a number that is cut off says nothing."""
    if _least_width(table) <= console.width:
        console.print(table)
        return
    names = [str(column.header) for column in table.columns]
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(str(name))
        rows = [(f"  {label}", str(cell)) for label, cell in zip(names[1:], cells, strict=True) if cell]
        print_labelled(console, rows)


def _least_width(table: Table) -> int:
    """Below this a cell is cut off, or a word of it is."""
    return sum(map(_least_column, table.columns)) + _GAP * (len(table.columns) - 1)


def _least_column(column: Column) -> int:
    texts = map(str, (column.header, *column.cells))
    parts = texts if column.no_wrap else (word for text in texts for word in text.split())
    return max(map(cell_len, parts), default=0)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Say what takes long: a spinner on a terminal, a line elsewhere."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        typer.echo(text, err=True)
        yield


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


class ErrorSentences(TyperGroup):
    """Commands whose mistakes end in a sentence instead of a traceback."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        with _errors_as_sentences():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_sentences(ctx):
            return super().invoke(ctx)


@contextmanager
def _errors_as_sentences(ctx: Any = None) -> Iterator[None]:
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

"""Output of commands, and the group that they belong to.

Results go to standard output, progress to standard error. An error is reported as one sentence, never as a
traceback; ``_exit_status`` decides its status.
"""

from __future__ import annotations

import json
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
from typer.core import TyperCommand, TyperGroup

from dpaudit.cli._exit_status import (
    UNDERPOWERED,
    VIOLATION,
    ExitStatus,
    UnexpectedExitError,
    exit_on_error,
    flush,
)
from dpaudit.errors import InputError
from dpaudit.stats import Verdict

EXIT_STATUS: Final = {
    Verdict.NO_VIOLATION: 0,
    Verdict.VIOLATION: VIOLATION,
    Verdict.UNDERPOWERED: UNDERPOWERED,
}
_WORDS = "dpaudit.words"  # key of the arguments of the command line
_UsageError: Any = typer.BadParameter.__base__  # not exported by typer


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output() -> Console:
    """Return a console on standard output that prints square brackets literally."""
    return _Console(highlight=False, markup=False, emoji=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_labelled(console: Console, rows: Sequence[tuple[str, str | Text]]) -> None:
    """Print labeled lines; long text is wrapped within its own column."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    console.print(grid)


def slim_table(*left: str) -> Table:
    """Return a table without a frame, as narrow as its cells, whose first columns hold text."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table; on a console too narrow for it, print one block per row to avoid truncating numbers."""
    if _least_width(table) <= console.width:
        console.print(table)
        return
    names = [str(column.header) for column in table.columns]
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(str(name))
        rows = [(f"  {label}", str(cell)) for label, cell in zip(names[1:], cells, strict=True) if cell]
        print_labelled(console, rows)


def _least_width(table: Table) -> int:
    """Return the width below which a word would be truncated."""
    gaps = 2 * (len(table.columns) - 1)  # two spaces between columns
    return sum(map(_least_column, table.columns)) + gaps


def _least_column(column: Column) -> int:
    texts = map(str, (column.header, *column.cells))
    unbreakable = texts if column.no_wrap else (word for text in texts for word in text.split())
    return max(map(cell_len, unbreakable), default=0)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Announce a slow operation: with a spinner on a terminal, with a line of text elsewhere."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        typer.echo(text, err=True)
        yield


class DecidingCommand(TyperCommand):
    """A command that ends with ``ExitStatus``: an exit of typer comes from other code, as the audited one."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit as error:
            raise UnexpectedExitError(f"typer.Exit({error.exit_code!r}) was raised") from error


class SentenceErrorGroup(TyperGroup):
    """A group of commands that reports errors as sentences instead of tracebacks."""

    def main(self, args: Any = None, *others: Any, **options: Any) -> Any:
        with exit_on_error(tuple(sys.argv[1:] if args is None else args)):
            # Outside of the methods below, typer catches interrupts: it returns 130, whatever the signal.
            if super().main(args, *others, **{**options, "standalone_mode": False}) is not None:
                raise KeyboardInterrupt

    def _main_shell_completion(self, *words: Any, **options: Any) -> None:
        try:
            super()._main_shell_completion(*words, **options)
        except SystemExit as error:  # of typer, which has printed the completions
            raise ExitStatus(error.code) from error

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        words = tuple(args)
        with exit_on_error(words), _decided():
            context = super().make_context(info_name, args, parent, **extra)
            context.meta[_WORDS] = words
            return context

    def invoke(self, ctx: Any) -> Any:
        with exit_on_error(ctx.meta[_WORDS]):
            try:
                with _decided(ctx):
                    return super().invoke(ctx)
            finally:
                flush()


@contextmanager
def _decided(ctx: Any = None) -> Iterator[None]:
    """Turn typer's own exceptions into those of dpaudit and Python."""
    try:
        yield
    except typer.Exit as error:
        raise ExitStatus(error.exit_code) from error
    except _UsageError as error:
        raise InputError(_usage(error, ctx)) from error


def _usage(error: Any, ctx: Any) -> str:
    """Return typer's message about the arguments, and the command that prints the help."""
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    if error.ctx is not None:
        return f"{text}{'' if text.endswith('?') else '.'} See: {error.ctx.command_path} --help"
    if ctx is None or ctx.invoked_subcommand is None:
        return f"{text}. See: dpaudit --help"
    return f"{text}.{_option_help(error, ctx)} See: {ctx.command_path} {ctx.invoked_subcommand} --help"


def _option_help(error: Any, ctx: Any) -> str:
    """Return the help of an option whose value is missing: it may list the possible values."""
    name, command = getattr(error, "option_name", None), ctx.command.get_command(ctx, ctx.invoked_subcommand)
    texts = [option.help for option in command.params if name in option.opts and option.help]
    return f" {texts[0].rstrip('.')}." if texts else ""

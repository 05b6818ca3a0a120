"""Where text goes: results to standard output, progress to standard error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

__all__ = ["output", "print_json", "print_labelled", "print_table", "slim_table", "working"]

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

"""How a reproduced figure is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dpaudit.cli._console import print_table, slim_table

if TYPE_CHECKING:
    from dpaudit.experiments.reproduction import Reproduced

__all__ = ["print_reproduced"]

_WORDS = frozenset({"method", "lines", "canary", "kind"})  # columns that are easier to read in one line


def print_reproduced(console: Console, found: Reproduced, files: Sequence[Path]) -> None:
    """The tables, which methods are not sound, and where everything is."""
    data = f", data {', '.join(found.data)}" if found.data else ""
    console.print(f"{found.figure.title} (scale {found.scale}, seed {found.seed}{data})", soft_wrap=True)
    for one in found.tables:
        console.print()
        console.print(one.title, soft_wrap=True)
        table = slim_table()
        for place, name in enumerate(one.header):
            is_text = place == 0 or name in _WORDS
            table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text, overflow="fold")
        for row in one.rows:
            table.add_row(*row)
        print_table(console, table)
    unsound = [
        f"{method}, {rule} ({kind})" for (method, rule), kind in found.kinds.items() if kind != "confidence"
    ]
    if unsound:
        console.print()
        console.print(f"Not confidence bounds: {'; '.join(unsound)}.")
    for remark in found.remarks:
        console.print()
        console.print(remark)
    console.print()
    for path in files:
        console.print(f"Written: {path}", soft_wrap=True)

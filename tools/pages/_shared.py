"""What the scripts of this folder share: paths, the blocks of a page, and helpers of tests and benchmarks."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "observers")]

from _measure import ONE_THREAD, Table, finish, restart_in_environment  # noqa: E402

__all__ = [
    "DOCS",
    "ONE_THREAD",
    "ROOT",
    "Table",
    "block_of",
    "finish",
    "markdown_table",
    "read_csv",
    "restart_in_environment",
    "write",
    "write_block",
    "write_csv",
    "write_tables",
]

DOCS = ROOT / "docs"


def _pattern(script: str) -> re.Pattern[str]:
    return re.compile(
        f"({re.escape(f'<!-- written by tools/pages/{script} -->')})(.*?)(<!-- end -->)", re.DOTALL
    )


def write_block(page: Path, script: str, text: str) -> None:
    """Replace the block that ``script`` wrote, a name such as "zoo.py: runs", by this text."""
    page.write_text(
        _pattern(script).sub(lambda match: f"{match[1]}\n\n{text}\n\n{match[3]}", page.read_text())
    )


def block_of(page: Path, script: str) -> str:
    """Return the block that ``script`` wrote."""
    match = _pattern(script).search(page.read_text())
    return "" if match is None else match[2]


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def write_tables(name: str, text: str) -> None:
    """Write Markdown tables with equal heads, and how many runs each row has, to a file of docs/data."""
    runs, rows = "", list[list[str]]()
    for line in text.splitlines():
        if match := re.match(r"([\d,]+) simulated training runs per row", line):
            runs = match[1].replace(",", "")
        elif line.startswith("|") and not line.startswith("| ---"):
            cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
            rows.append([*cells, *([runs if rows else "runs"] if runs else [])])
    write_csv(DOCS / "data" / name, rows[0], [row for row in rows if row[:2] != rows[0][:2]])


def read_csv(path: Path) -> list[list[str]]:
    """Return the rows of a file without its head; none if there is no file."""
    return list(csv.reader(path.read_text().splitlines()))[1:] if path.exists() else []


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table, atomically."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    write(path, text.getvalue())


def write(path: Path, text: str) -> None:
    """Write the file atomically."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)

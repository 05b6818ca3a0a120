"""What the scripts of this folder share: paths, the blocks of a page, and helpers of tests and benchmarks."""

from __future__ import annotations

import re
import sys
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
    "restart_in_environment",
    "write_block",
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

"""The limits of what ``print(result)`` shows, wherever a test prints one."""

from __future__ import annotations

import re

HEADLINES = ("VIOLATION", "NO VIOLATION FOUND", "UNDERPOWERED", "NO CLAIM TESTED")


def require_short(text: str) -> None:
    """Require at most 9 lines, 800 characters, and 100 columns of ASCII."""
    assert text.isascii()
    assert len(text) <= 800
    lines = text.splitlines()
    assert len(lines) <= 9
    assert max(map(len, lines)) <= 100


def printed_blocks(text: str) -> list[str]:
    """Return the blocks of results in a printed text: a headline, and the indented lines below it."""
    return re.findall(rf"^(?:{'|'.join(HEADLINES)})[^\n]*: [^\n]*\n(?:  [^\n]*\n)*", text, re.MULTILINE)

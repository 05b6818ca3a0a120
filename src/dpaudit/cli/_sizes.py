"""How much of a file is taken into memory, and how much of it is repeated in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpaudit._foreign import LARGEST_ARRAY
from dpaudit.errors import InputError

__all__ = ["listed", "require_moderate", "shortened"]

_LONGEST = 60  # characters of one value
_MOST = 10  # names


def require_moderate(path: Path, size: int) -> None:
    """Refuse an array of more than so many bytes before it is unpacked."""
    if size > LARGEST_ARRAY:
        raise InputError(
            f"Expected arrays of at most {LARGEST_ARRAY:,} bytes in {path}, got one of {size:,}; .npy files "
            "may be of any size."
        )


def shortened(word: str) -> str:
    """A value from a file, as a sentence shows it."""
    return repr(word if len(word) <= _LONGEST else f"{word[:_LONGEST]}...")


def listed(names: Sequence[str]) -> str:
    """Some names from a file, as a sentence shows them."""
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    return (", ".join(map(shortened, names[:_MOST])) or "none") + more

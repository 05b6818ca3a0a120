"""Words of anybody, made fit to be shown."""

from __future__ import annotations

import unicodedata

__all__ = ["fit"]

_KEPT = "\n\t"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def fit(text: str) -> str:
    """Without what moves a terminal's cursor, turns the direction of letters, or is no letter at all.

    >>> fit("a" + chr(27) + "[2J") == "a" + chr(0xFFFD) + "[2J"
    True
    """
    return "".join(one if one in _KEPT or _is_shown(one) else _REPLACEMENT for one in text)


def _is_shown(one: str) -> bool:
    # control characters, those of format such as a change of direction, and halves of a pair
    return unicodedata.category(one) not in ("Cc", "Cf", "Cs")

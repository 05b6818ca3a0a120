"""Where two sets of plain values differ."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["difference"]


def difference(stored: Any, given: Any, place: str = "") -> str | None:
    """The first value that is not the same, as a sentence's part.

    >>> difference({"a": {"b": 1}}, {"a": {"b": 2}})
    'a.b is 2 here and 1 there'
    """
    if isinstance(stored, dict) and isinstance(given, dict):
        keys = [*stored, *(key for key in given if key not in stored)]
        found = (difference(stored.get(k), given.get(k), f"{place}.{k}".lstrip(".")) for k in keys)
        return next((text for text in found if text is not None), None)
    if stored == given:
        return None
    return f"{place} is {json.dumps(given)} here and {json.dumps(stored)} there"

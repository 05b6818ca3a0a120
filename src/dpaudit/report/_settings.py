"""Nested settings as lines with a label each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dpaudit.report._text import fit

__all__ = ["flattened"]

# Who knows a seed knows the noise. A report is for showing around.
_SECRET = ("seed", "seeds")
_DEEPEST = 8
_LONGEST = 400  # characters of one value


def flattened(values: Mapping[str, Any]) -> dict[str, str]:
    """Labels joined by dots; what was left open is left out, and so are seeds.

    >>> flattened({"seed": 7, "model": {"name": "mlp", "hidden": [128, 64], "bias": None}})
    {'model.name': 'mlp', 'model.hidden': '128, 64'}
    """
    return dict(_lines(values, "", 0))


def _lines(values: Mapping[str, Any], place: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if key in _SECRET or value is None:
            continue
        label = f"{place}.{key}" if place else str(key)
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _lines(value, label, depth + 1)
        else:
            yield fit(label[:_LONGEST]), fit(_shown(value))


def _shown(value: object) -> str:
    if isinstance(value, list):
        text = ", ".join(map(_shown, value[:50]))
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

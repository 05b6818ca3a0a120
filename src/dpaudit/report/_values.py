"""Values from files that anybody may have written, checked once and made fit to be shown.

What :func:`checked` returns holds neither control characters nor texts or numbers without an end. What is
missing, or of another type, is refused where an object is made of it, by ``from_dict`` and :func:`text`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from dpaudit.errors import InputError

_LONGEST_TEXT = 10_000  # characters
_LARGEST = 2**63  # of whole numbers
_DEEPEST = 32  # objects and lists inside of each other
_KEPT = "\n\t"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with all texts fit to be shown; raise ``InputError`` where one has no end.

    >>> checked({"name": "a" + chr(27), "sizes": [1, 2.5]}) == {"name": "a" + chr(0xFFFD), "sizes": [1, 2.5]}
    True
    """
    return {fit(key[:_LONGEST_TEXT]): _checked(value, key, 0) for key, value in values.items()}


def _checked(value: Any, place: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise refused(place, f"to have at most {_DEEPEST} levels", value)
    if isinstance(value, Mapping):
        return {
            fit(key[:_LONGEST_TEXT]): _checked(one, f"{place}.{key}", depth + 1) for key, one in value.items()
        }
    if isinstance(value, list):
        return [_checked(one, f"{place}.{number}", depth + 1) for number, one in enumerate(value)]
    if isinstance(value, str):
        if len(value) > _LONGEST_TEXT:
            raise refused(place, f"to be a text of at most {_LONGEST_TEXT:,} characters", value)
        return fit(value)
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise refused(place, "to be a smaller number", value)
    if isinstance(value, float) and math.isinf(value):  # JSON has none, but numbers that are read as one
        raise refused(place, "to be a finite number", value)
    return value


def fit(text: str) -> str:
    """Return the text without what moves a terminal's cursor, turns the direction of letters, or is none.

    >>> fit("a" + chr(27) + "[2J") == "a" + chr(0xFFFD) + "[2J"
    True
    """
    return "".join(one if one in _KEPT or _is_shown(one) else _REPLACEMENT for one in text)


def _is_shown(one: str) -> bool:
    # control characters, those of format such as a change of direction, and halves of a pair
    return unicodedata.category(one) not in ("Cc", "Cf", "Cs")


def section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key, or raise ``InputError``."""
    value = values.get(key)
    if not isinstance(value, Mapping):
        raise refused(key, "to be an object", value)
    return value


def text(values: Mapping[str, Any], key: str) -> str:
    """Return the text under a key, or raise ``InputError``."""
    value = values.get(key)
    if not isinstance(value, str):
        raise refused(key, "to be a text", value)
    return value


def items(values: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """Return the list of texts or objects under a key, no list as an empty one, or raise ``InputError``."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise refused(key, f"to be a list of {'texts' if kind is str else 'objects'}", value)
    return value


def refused(place: str, expected: str, value: object) -> InputError:
    """The error that says what is wrong with a value of a file."""
    got = "nothing" if value is None else f"{value!a:.60}"  # it goes to a terminal
    return InputError(f"Expected {ascii(place)[1:-1]:.200} {expected}, got {got}.")


# Who knows a seed knows the noise. A report is for showing around.
_SECRET = ("seed", "seeds")
_DEEPEST_SETTING = 8
_LONGEST_SETTING = 400  # characters of one value


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
        if isinstance(value, Mapping) and depth < _DEEPEST_SETTING:
            yield from _lines(value, label, depth + 1)
        else:
            yield fit(label[:_LONGEST_SETTING]), fit(_shown(value))


def _shown(value: object) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(_shown, value[:50]))
    elif isinstance(value, bool):
        shown = "yes" if value else "no"
    elif isinstance(value, float):
        shown = f"{value:.6g}"
    else:
        shown = str(value)
    return shown if len(shown) <= _LONGEST_SETTING else f"{shown[:_LONGEST_SETTING]}..."

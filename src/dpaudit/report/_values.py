"""Plain values that somebody else wrote: each is checked where it is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dpaudit.errors import InputError
from dpaudit.report._text import fit

__all__ = ["Values"]

_LONGEST = 10_000  # characters of a text that is shown


@dataclass(frozen=True)
class Values:
    """A mapping from a file, and the words by which an error names it."""

    raw: Mapping[str, Any]
    source: str
    place: str = ""

    def has(self, key: str) -> bool:
        """Whether there is something under this key."""
        return self.raw.get(key) is not None

    def text(self, key: str) -> str:
        """A text that is not too long to be shown."""
        value = self.raw.get(key)
        if not isinstance(value, str) or len(value) > _LONGEST:
            raise self._refused(key, f"to be a text of at most {_LONGEST:,} characters", value)
        return fit(value)

    def number(self, key: str) -> float:
        """A number, not negative; JSON has no infinity, and has a word for it."""
        return math.inf if self.raw.get(key) == "inf" else self.real(key, low=0.0)

    def share(self, key: str) -> float:
        """A number from 0 to 1."""
        return self.real(key, low=0.0, high=1.0)

    def real(self, key: str, *, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number in a range."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self._refused(key, "to be a number", value)
        if not low <= value <= high:
            raise self._refused(key, f"in [{low:g}, {high:g}]", value)
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """A number or nothing."""
        return self.number(key) if self.has(key) else None

    def whole(self, key: str) -> int:
        """A whole number, not negative."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise self._refused(key, "to be a whole number", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; no list is an empty one."""
        items = self._items(key)
        numbered = Values({str(i): item for i, item in enumerate(items)}, self.source, self._named(key))
        return tuple(numbered.text(str(i)) for i in range(len(items)))

    def section(self, key: str) -> Values:
        """The values under a key."""
        return self._section(key, self.raw.get(key))

    def sections(self, key: str) -> Iterator[Values]:
        """A list of those; no list is an empty one."""
        for number, item in enumerate(self._items(key)):
            yield self._section(f"{key}.{number}", item)

    def _section(self, key: str, value: object) -> Values:
        if not isinstance(value, Mapping):
            raise self._refused(key, "to be an object", value)
        return Values(value, self.source, self._named(key))

    def _items(self, key: str) -> list[Any]:
        value = self.raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._refused(key, "to be a list", value)
        return value

    def _named(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _refused(self, key: str, expected: str, value: object) -> InputError:
        got = "nothing" if value is None else ascii(value)  # it goes to a terminal
        shown = got if len(got) <= 60 else f"{got[:60]}..."
        return InputError(f"Expected {self._named(key)} {expected} in {self.source}, got {shown}.")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False

"""Trade-offs, inferences and threshold rules as plain values: ``{"type": "Fixed", "threshold": 0.5}``.

Every class that implements one of these three interfaces can be read by its name, including
classes defined by users. Reading looks up the name and calls the class with the stored fields; nothing else
can be called. An unknown name (a report may be read where the author's class is not defined) can still be
shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from dpaudit.errors import InputError, quoted

SCHEMA_VERSION = 2
"""The version of the schema of results in files and on standard output."""


class Serializable:
    """A frozen dataclass that is stored as its type and its fields."""

    @property
    def label(self) -> str:
        """A short name for the columns of tables."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, from which :meth:`from_dict` restores an equal object."""
        values: dict[str, Any] = {}
        if is_dataclass(self):
            values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return {"type": type(self).__name__, **{name: _plain(value) for name, value in values.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self | NamedPart:
        """Restore an object from :meth:`to_dict`; an unknown type becomes a placeholder that can be shown.

        >>> from dpaudit import ThresholdRule
        >>> ThresholdRule.from_dict({"type": "Fixed", "threshold": 0.5})
        Fixed(threshold=0.5)
        >>> ThresholdRule.from_dict({"type": "Unheard", "size": 50})
        Unheard(size=50)
        """
        restored = _read(values, 0)
        if not isinstance(restored, cls | NamedPart):
            raise InputError(f"These are the values of {values['type']}, not of {cls.__name__}.")
        return restored


@dataclass(frozen=True, repr=False)
class NamedPart:
    """A part of a method that is known only by name.

    Given counts have no threshold rule, guesses have no threshold, and a file may name a class that is not
    defined where it is read.
    """

    name: str
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """A short name for the columns of tables."""
        return self.name

    @property
    def symbol(self) -> str:
        """The name of a trade-off's parameter, which is unknown here."""
        return "parameter"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"type": self.name, **{name: _plain(value) for name, value in self.fields}}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.fields)
        return f"{self.name}({fields})" if fields else self.name


def _plain(value: Any) -> Any:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return {"type": f"{value!r:.200}"}  # not representable in JSON: shown, and read back as a name


def _read(values: Any, depth: int) -> Any:
    """Restore objects of known types from the inside out; keep the fields of others."""
    if not isinstance(values, Mapping) or not isinstance(values.get("type"), str) or depth > 8:
        raise InputError(f"The value must be an object with a type, got {quoted(values)}.")
    rest = {name: _field(value, depth) for name, value in values.items() if name != "type"}
    kind = _subclasses(Serializable).get(values["type"])
    if kind is None:
        return NamedPart(values["type"], tuple(rest.items()))
    try:
        restored = kind(**rest)
        _ = repr(restored), restored.label  # fails if a field has the wrong type
    except InputError:
        raise
    # fields of another version, or edited ones
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"These are not the fields of {kind.__name__}: {quoted(values)}.") from error
    return restored


def _subclasses(kind: type[Serializable]) -> dict[str, type[Serializable]]:
    """Return all classes below this one by name; of several with the same name, the last."""
    names = {kind.__name__: kind}
    for subclass in kind.__subclasses__():
        names |= _subclasses(subclass)
    return names


def _field(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return _read(value, depth + 1)
    return tuple(_field(item, depth) for item in value) if isinstance(value, list | tuple) else value

"""Trade-offs, inferences and threshold rules as plain values: ``{"type": "Fixed", "threshold": 0.5}``.

Every class that implements one of these three interfaces is registered by name when it is defined, including
classes defined by users. Reading looks up the name and calls the class with the stored fields; nothing else
can be called. An unknown name (a report may be read where the author's class is not defined) can still be
shown. Version 0.1 stored ``repr`` strings instead, which :func:`from_repr` reads.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from dpaudit.errors import InputError, quoted

_KNOWN: dict[str, type[Serializable]] = {}
_DEEPEST = 8  # levels of nested parts
_PARTS = "tradeoff", "inference", "threshold_rule"
_LONGEST_TEXT = 10_000  # characters of a part; dpaudit never writes longer ones

SCHEMA_VERSION = 2
"""The version of the schema of results in files and on standard output."""


class Serializable:
    """A frozen dataclass that is stored as its type and its fields."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _KNOWN[cls.__name__] = cls

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
        found = _read(values, 0)
        if not isinstance(found, cls | NamedPart):
            raise InputError(f"Expected the values of {cls.__name__}, got those of {values['type']}.")
        return found


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


def upgraded(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored result in the current schema; one that is already current is returned unchanged.

    Version 1 of the schema stored the parts of a method as ``repr`` strings.

    >>> upgraded({"schema_version": 1, "bound": {"threshold_rule": "Fixed(threshold=0.5)"}})
    {'schema_version': 2, 'bound': {'threshold_rule': {'type': 'Fixed', 'threshold': 0.5}}}
    """
    if result.get("schema_version") != 1:
        return dict(result)
    values = {name: _upgraded_bound(value) for name, value in result.items()}
    if isinstance(result.get("methods"), list):
        values["methods"] = [_upgraded_bound(one) for one in result["methods"]]
    return {**values, "schema_version": SCHEMA_VERSION}


def _upgraded_bound(bound: Any) -> Any:
    """Return a bound with structured methods, and anything else unchanged."""
    if not isinstance(bound, Mapping):
        return bound
    texts = {name: bound[name] for name in _PARTS if isinstance(bound.get(name), str)}
    short = {name: text for name, text in texts.items() if len(text) <= _LONGEST_TEXT}
    label = {"label": " + ".join(short.values())} if len(short) == len(_PARTS) else {}
    return {**bound, **label, **{name: from_repr(text) for name, text in short.items()}}


def from_repr(text: str) -> dict[str, Any]:
    """Convert a string stored by version 0.1, the ``repr`` of a call or a name, to plain values.

    >>> from_repr("SubsampledGaussian(sample_rate=0.1, num_steps=50)")
    {'type': 'SubsampledGaussian', 'sample_rate': 0.1, 'num_steps': 50}
    >>> from_repr("guesses")
    {'type': 'guesses'}
    """
    chosen, _, others = text.partition(", the better of ")
    try:
        return _best_of(chosen, others) if others else _call(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return {"type": text}  # text from another program: shown, never evaluated


def _best_of(chosen: str, others: str) -> dict[str, Any]:
    shares = [re.fullmatch(r"(.+) with ([\d.]+) of the error", one) for one in others.split(" and ")]
    known = [(from_repr(one[1]), float(one[2])) for one in shares if one]
    rules, errors = [rule for rule, _ in known], [error for _, error in known]
    return {"type": "BestOf", "chosen": from_repr(chosen), "rules": rules, "shares": errors}


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with keywords")
    values = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    # fields that bets have had only since
    since = {"tails": 0.0, "stop_loss": False} if node.func.id == "Betting" else {}
    return {"type": node.func.id, **values, **since}


def _plain(value: Any) -> Any:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return {"type": f"{value!r:.200}"}  # not representable in JSON: shown, and read back as a name


def _read(values: Any, depth: int) -> Any:
    """Restore objects of known types from the inside out; keep the fields of others."""
    if not isinstance(values, Mapping) or not isinstance(values.get("type"), str) or depth > _DEEPEST:
        raise InputError(f"Expected an object with a type, got {quoted(values)}.")
    rest = {name: _field(value, depth) for name, value in values.items() if name != "type"}
    kind = _KNOWN.get(values["type"])
    if kind is None:
        return NamedPart(values["type"], tuple(rest.items()))
    try:
        found = kind(**rest)
        _ = repr(found), found.label  # fails if a field has the wrong type
    except InputError:
        raise
    # fields of another version, or edited ones
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"Expected the fields of {kind.__name__}, got {quoted(values)}.") from error
    return found


def _field(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return _read(value, depth + 1)
    return tuple(_field(one, depth) for one in value) if isinstance(value, list | tuple) else value

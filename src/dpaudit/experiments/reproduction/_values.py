"""Plain values: what cells are named by, what they measure, and what is asked of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["Key", "Row", "Rows", "Settings", "kinds", "mean", "only", "pairs_of", "spread", "values_of"]

Key: TypeAlias = dict[str, float | int | str]
Row: TypeAlias = dict[str, float | int | str | None]
Rows: TypeAlias = Sequence[Row]
Settings: TypeAlias = Mapping[str, Any]


def only(rows: Iterable[Row], **wanted: float | int | str | None) -> list[Row]:
    """The rows that have these values.

    >>> only([{"a": 1, "b": 2}, {"a": 3, "b": 4}], a=3)
    [{'a': 3, 'b': 4}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def values_of(rows: Iterable[Row], name: str) -> list[Any]:
    """The different values of a column, in the order in which they appear."""
    return list(dict.fromkeys(row[name] for row in rows if row.get(name) is not None))


def pairs_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """The methods with their threshold rules, in the order in which they appear."""
    return list(dict.fromkeys((str(row["method"]), str(row["rule"])) for row in rows))


def mean(rows: Iterable[Row], name: str = "epsilon") -> float | None:
    """Of a column; None where there is nothing."""
    found = _numbers(rows, name)
    return statistics.fmean(found) if found else None


def spread(rows: Iterable[Row], name: str = "epsilon") -> float:
    """The standard deviation of a column, 0 of a single value."""
    found = _numbers(rows, name)
    return statistics.stdev(found) if len(found) > 1 else 0.0


def _numbers(rows: Iterable[Row], name: str) -> list[float]:
    return [float(value) for row in rows if (value := row.get(name)) is not None]


def kinds(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """What the error rate of each method with each threshold rule means."""
    return {
        (str(row["method"]), str(row.get("rule") or "")): str(row["kind"])
        for row in rows
        if row.get("kind") is not None and row.get("method") is not None
    }

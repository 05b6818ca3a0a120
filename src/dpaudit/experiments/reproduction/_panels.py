"""Select and average the rows of cells, and turn them into panels and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dpaudit._types import FloatArray
from dpaudit.experiments.reproduction._figure import Mark, Panel, Row, Rows, Series, Table

_BOUND = "epsilon lower bound"


def only(rows: Iterable[Row], **wanted: float | int | str | None) -> list[Row]:
    """Return the rows that have these values.

    >>> only([{"a": 1, "b": 2}, {"a": 3, "b": 4}], a=3)
    [{'a': 3, 'b': 4}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def values_of(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the distinct values of a column, in the order in which they appear."""
    return list(dict.fromkeys(row[name] for row in rows if row.get(name) is not None))


def numbers(rows: Iterable[Row], name: str) -> list[float]:
    """Return all numbers of a column; rows without one are skipped."""
    return [float(value) for row in rows if (value := row.get(name)) is not None]


def mean(rows: Iterable[Row], name: str = "epsilon") -> float | None:
    """Return the mean of a column, None if it has no number."""
    column = numbers(rows, name)
    return statistics.fmean(column) if column else None


def spread(rows: Iterable[Row], name: str = "epsilon") -> float:
    """Return the standard deviation of a column, 0 for a single value."""
    column = numbers(rows, name)
    return statistics.stdev(column) if len(column) > 1 else 0.0


def mean_text(rows: Iterable[Row]) -> str:
    """Return the mean epsilon for a table, or an empty string if there is none."""
    value = mean(rows)
    return "" if value is None else f"{value:.2f}"


def mean_cells(rows: Sequence[Row], column: str, values: Iterable[float]) -> list[str]:
    """Return the mean epsilon at each of these values of a column, for the row of a table."""
    return [mean_text(only(rows, **{column: value})) for value in values]


def pairs_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return the methods with their threshold rules, in the order in which they appear."""
    return list(dict.fromkeys((str(row["method"]), str(row["rule"])) for row in rows))


def kinds(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """Return the kind of bound of each method with each threshold rule."""
    return {
        (str(row["method"]), str(row.get("rule") or "")): str(row["kind"])
        for row in rows
        if row.get("kind") is not None and row.get("method") is not None
    }


def method_label(method: str, rule: str) -> str:
    """Return a method with its threshold rule, as in a legend."""
    return f"{method}, {rule}" if rule else method


def by_method(rows: Rows) -> Iterator[tuple[str, list[Row]]]:
    """Yield the label and the rows of each method with each threshold rule."""
    for method, rule in pairs_of(rows):
        yield method_label(method, rule), only(rows, method=method, rule=rule)


def comparison_table(
    rows: Sequence[Sequence[str]], title: str = "Comparison with the paper", *, names_papers: bool = False
) -> Table:
    """Return a table with the paper's value and ours for each quantity."""
    return Table(title=title, header=("", "paper", "here"), rows=rows, names_papers=names_papers)


def rates_rows(fpr: FloatArray, fnr: FloatArray) -> list[Row]:
    """Return the points of a trade-off curve as rows."""
    return [{"fpr": float(x), "fnr": float(y)} for x, y in zip(fpr, fnr, strict=True)]


def rates_of(rows: Rows) -> tuple[list[float], list[float]]:
    """Return the false positive and the false negative rates of a curve."""
    return numbers(rows, "fpr"), numbers(rows, "fnr")


def rates_series(rows: Rows, label: str, mark: Mark = Mark.LINE, every: int = 1) -> Series:
    """Return a curve of error rates with every ``every``-th point."""
    x, y = rates_of(rows)
    return Series(label=label, x=x[::every], y=y[::every], mark=mark)


def rates_panel(series: Sequence[Series], title: str = "") -> Panel:
    """Return a panel with both error rates from 0 to 1."""
    return Panel(
        title=title,
        x_label="false positive rate",
        y_label="false negative rate",
        series=series,
        x_range=(0, 1),
        y_range=(0, 1),
    )


def bounds_panel(
    rows: Rows,
    axis: str,
    label: str,
    level: float,
    *,
    title: str = "",
    log_x: bool = False,
    y_range: tuple[float, float] | None = None,
) -> Panel:
    """Return the bounds of all methods over a column, with the true value as a line."""
    return Panel(
        title=title,
        x_label=label,
        y_label=_BOUND,
        series=series_over(rows, axis),
        level=level,
        log_x=log_x,
        y_range=y_range,
    )


def bars_panel(
    rows: Rows,
    column: str,
    values: Sequence[float | str],
    level: float,
    *,
    title: str = "",
    x_label: str = "",
    level_label: str = "theoretical",
) -> Panel:
    """Return the mean bounds of all methods at these values of a column as grouped bars."""
    bars = [
        _mean_series(method_rows, column, values, label=label, x=range(len(values)), mark=Mark.BARS)
        for label, method_rows in by_method(rows)
    ]
    return Panel(
        title=title,
        x_label=x_label,
        y_label=_BOUND,
        series=bars,
        categories=[value if isinstance(value, str) else f"{value:g}" for value in values],
        level=level,
        level_label=level_label,
    )


def epsilon_panel(series: Sequence[Series], epsilons: Sequence[float], title: str) -> Panel:
    """Return a panel of bounds over the theoretical epsilon, with the diagonal."""
    return Panel(
        title=title,
        x_label="theoretical epsilon",
        y_label=_BOUND,
        series=[*series, diagonal(epsilons)],
    )


def diagonal(epsilons: Sequence[float]) -> Series:
    """Return the line of tight bounds."""
    return Series(label="theoretical", x=epsilons, y=epsilons, mark=Mark.TRUTH)


def series_over(rows: Rows, axis: str) -> list[Series]:
    """Return the mean bound over a column, with the spread over runs, for each method and rule."""
    series = []
    for label, method_rows in by_method(rows):
        values = sorted(values_of(method_rows, axis))
        mark = Mark.LINE if method_rows[0].get("kind") == "confidence" else Mark.DASHES
        series.append(_mean_series(method_rows, axis, values, label=label, x=values, mark=mark))
    return series


def _mean_series(
    rows: Rows, column: str, values: Sequence[float | str], *, label: str, x: Sequence[float], mark: Mark
) -> Series:
    cells = [only(rows, **{column: value}) for value in values]
    return Series(
        label=label,
        x=x,
        y=[mean(cell) or 0.0 for cell in cells],
        spread=[spread(cell) for cell in cells],
        mark=mark,
    )

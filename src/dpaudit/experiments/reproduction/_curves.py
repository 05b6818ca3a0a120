"""Pictures that several figures have: bounds over a number, a line for each method."""

from __future__ import annotations

from collections.abc import Sequence

from dpaudit.experiments.reproduction._picture import Mark, Panel, Series
from dpaudit.experiments.reproduction._values import Rows, mean, only, pairs_of, spread, values_of

__all__ = [
    "bars",
    "bounds_panel",
    "diagonal",
    "labelled",
    "rates_of",
    "rates_panel",
    "rates_series",
    "series_over",
]


def labelled(method: str, rule: str) -> str:
    """A method with its threshold rule, as a legend says it."""
    return f"{method}, {rule}" if rule else method


def rates_panel(series: Sequence[Series], title: str = "") -> Panel:
    """Both error rates from 0 to 1."""
    return Panel(
        title=title,
        x_label="false positive rate",
        y_label="false negative rate",
        series=series,
        x_range=(0, 1),
        y_range=(0, 1),
    )


def rates_of(rows: Rows) -> tuple[list[float], list[float]]:
    """The false positive and the false negative rates of a curve."""
    x, y = ([float(row[axis] or 0.0) for row in rows] for axis in ("fpr", "fnr"))
    return x, y


def rates_series(rows: Rows, label: str, mark: Mark = Mark.LINE, every: int = 1) -> Series:
    """A curve of error rates; of many points only some are drawn."""
    x, y = rates_of(rows)
    return Series(label=label, x=x[::every], y=y[::every], mark=mark)


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
    """The bounds of all methods over a column, below the truth."""
    return Panel(
        title=title,
        x_label=label,
        y_label="epsilon lower bound",
        series=series_over(rows, axis),
        level=level,
        log_x=log_x,
        y_range=y_range,
    )


def diagonal(epsilons: Sequence[float]) -> Series:
    """Where a bound would be that finds all there is."""
    return Series(label="theoretical", x=epsilons, y=epsilons, mark=Mark.TRUTH)


def bars(rows: Rows, column: str, places: Sequence[float | str]) -> list[Series]:
    """For each method and rule the mean bound at each place of a column, side by side."""
    found = []
    for method, rule in pairs_of(rows):
        own = only(rows, method=method, rule=rule)
        cells = [only(own, **{column: place}) for place in places]
        found.append(
            Series(
                label=labelled(method, rule),
                x=range(len(places)),
                y=[mean(cell) or 0.0 for cell in cells],
                spread=[spread(cell) for cell in cells],
                mark=Mark.BARS,
            )
        )
    return found


def series_over(rows: Rows, axis: str) -> list[Series]:
    """The mean bound over a column, with the standard deviation over runs, for each method and rule."""
    found = []
    for method, rule in pairs_of(rows):
        own = only(rows, method=method, rule=rule)
        places = sorted(values_of(own, axis))
        cells = [only(own, **{axis: place}) for place in places]
        is_heuristic = own[0].get("kind") != "confidence"
        found.append(
            Series(
                label=labelled(method, rule),
                x=places,
                y=[mean(cell) or 0.0 for cell in cells],
                spread=[spread(cell) for cell in cells],
                mark=Mark.DASHES if is_heuristic else Mark.LINE,
            )
        )
    return found

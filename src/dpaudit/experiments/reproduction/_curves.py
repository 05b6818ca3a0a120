"""Pictures that several figures have: bounds over a number, a line for each method."""

from __future__ import annotations

from collections.abc import Sequence

from dpaudit.experiments.reproduction._picture import Mark, Panel, Series
from dpaudit.experiments.reproduction._values import Rows, mean, only, spread, values_of

__all__ = ["labelled", "rates_panel", "series_over"]


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


def series_over(rows: Rows, axis: str) -> list[Series]:
    """The mean bound over a column, with the standard deviation over runs, for each method and rule."""
    found = []
    for method, rule in dict.fromkeys((row["method"], row["rule"]) for row in rows):
        own = only(rows, method=method, rule=rule)
        places = sorted(values_of(own, axis))
        cells = [only(own, **{axis: place}) for place in places]
        is_heuristic = own[0].get("kind") != "confidence"
        found.append(
            Series(
                label=labelled(str(method), str(rule)),
                x=places,
                y=[mean(cell) or 0.0 for cell in cells],
                spread=[spread(cell) for cell in cells],
                mark=Mark.DASHES if is_heuristic else Mark.LINE,
            )
        )
    return found

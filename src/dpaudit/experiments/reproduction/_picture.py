"""What is drawn and what is printed, as plain data: who draws it is not known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Mark", "Panel", "Picture", "Series", "Table"]


class Mark(StrEnum):
    """How the points of a series are shown."""

    LINE = "line"
    DASHES = "dashes"
    TRUTH = "truth"  # what the others should come near to
    POINTS = "points"
    BARS = "bars"
    STEPS = "steps"  # a histogram: y[i] from x[i] to x[i + 1]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points, with how far each may be off on either side."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    mark: Mark = Mark.LINE


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes. ``categories`` name the places 0, 1, ... of the x axis; ``level`` is the truth."""

    title: str = ""
    x_label: str
    y_label: str
    series: Sequence[Series]
    categories: Sequence[str] = ()
    level: float | None = None
    level_label: str = "theoretical"
    log_x: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Panels side by side, at most ``columns`` in a line."""

    panels: Sequence[Panel]
    columns: int = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers to read, such as those of the paper beside ours."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names_papers: bool = False
    """Whether data are called what the paper calls its own, also where others stand for them."""

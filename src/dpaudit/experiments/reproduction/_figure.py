"""The description of a figure or table of the paper: its scales, cells, data, rows, pictures and tables.

``reproduce`` measures the cells of a :class:`Figure`, which become :class:`FigureRows`. Pictures and tables
are plain values, which ``dpaudit.report`` draws.
"""

from __future__ import annotations

import statistics
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from dpaudit import _io
from dpaudit._types import FloatArray
from dpaudit.errors import InputError

Key: TypeAlias = dict[str, float | int | str]
Row: TypeAlias = dict[str, float | int | str | None]
Settings: TypeAlias = Mapping[str, Any]
_BOUND = "epsilon lower bound"


@dataclass(frozen=True, kw_only=True)
class Figure(ABC):
    """A figure or table of the paper, and how to measure it.

    The work is split into ``cells``; each is stored when it is finished. ``measure`` takes the key of a cell
    and returns its rows; ``picture`` and ``tables`` use the rows of all cells.
    """

    name: str
    title: str
    paper: str
    """Its place in the paper, and what it shows there."""
    settings: Mapping[Scale, Settings]
    needs: tuple[Need, ...] = ()
    has_processes: bool = False
    """Whether a single cell uses all cores, in which case cells are measured one at a time."""
    remarks: tuple[str, ...] = ()
    """Caveats about the comparison with the paper."""

    @abstractmethod
    def cells(self, settings: Settings, /) -> Sequence[Key]:
        """Return the keys of all cells, in the order in which they are measured."""

    @abstractmethod
    def measure(self, key: Key, work: Work, /) -> list[Row]:
        """Return the rows of one cell, without its key."""

    @abstractmethod
    def picture(self, rows: FigureRows, settings: Settings, /) -> Picture:
        """Return the picture to draw."""

    @abstractmethod
    def tables(self, rows: FigureRows, settings: Settings, /) -> Sequence[Table]:
        """Return the tables to print."""

    def described(self) -> dict[str, object]:
        """Return name, title, place in the paper and required files as plain values."""
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "data": [need.files for need in self.needs],
        }


class Scale(StrEnum):
    """The size of a reproduction, from seconds to a machine with a GPU."""

    TINY = "tiny"  # for tests: every part runs, but the numbers are meaningless
    CPU = "cpu"  # at most half an hour on two cores
    PAPER = "paper"  # the paper's own numbers of steps, models and observations


def crossed(**axes: Iterable[float | int | str]) -> list[Key]:
    """Return a key for each combination of values; the last name varies fastest.

    >>> crossed(epsilon=(1.0, 4.0), run=range(2))[:2]
    [{'epsilon': 1.0, 'run': 0}, {'epsilon': 1.0, 'run': 1}]
    """
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The settings, seed and directory of one cell."""

    settings: Settings
    seed: int
    folder: Path
    """The directory for the files of a training run, with which it resumes after an interrupt."""
    data: Data
    device: str = "cpu"
    num_workers: int | None = None
    """The number of processes if a cell starts any; None for one per core."""
    within: Callable[[str], None] = lambda _: None
    """Called with the progress of the cell as text."""

    def generator(self) -> np.random.Generator:
        """Return the RNG of the cell, which does not depend on other cells."""
        return np.random.default_rng(self.seed)


@dataclass(frozen=True)
class Need:
    """Files of one data set; the first of ``places`` that exists is used."""

    paper: str
    """The paper's name for the data."""
    files: str
    places: Sequence[Sequence[str]]
    """Pairs of a file in the data directory and the name of the data in configs."""


CATALOGUE: Mapping[str, Any] = tomllib.loads(_io.packaged("experiments", "reproduction", "figures.toml"))
"""All figures, and what they share."""
NEEDS = {table["paper"]: Need(**table) for table in CATALOGUE["data"]}


@dataclass(frozen=True)
class Data:
    """The source of data: the official files in a directory, or the digits that ship with dpaudit."""

    directory: Path | None = None
    embedded: bool = False

    def require(self, name: str, needs: Iterable[Need]) -> None:
        """Raise an error that names the missing files of a figure."""
        missing = [need.files for need in needs if not self.embedded and self._found(need) is None]
        if missing:
            where = "" if self.directory is None else f", which are not in {self.directory}"
            raise InputError(
                f"{name} needs --data-dir with its official files{where}: {' and '.join(missing)}; or pass "
                "--embedded to use the digits that come with dpaudit."
            )

    def names(self, needs: Sequence[Need]) -> list[str]:
        """Return the names of the data used, as stored in the identity of cells."""
        return ["digits"] if self.embedded and needs else [str(self._found(need)) for need in needs]

    def stand_ins(self, needs: Iterable[Need]) -> dict[str, str]:
        """Return labels for data that replace the paper's, by the paper's name for its data."""
        used = {need.paper: self.config(need)["name"] for need in needs}
        return {
            paper: f"{name} for {paper}"
            for paper, name in used.items()
            if name not in ("cifar10", "purchase100")
        }

    def config(self, need: Need) -> dict[str, Any]:
        """Return the table ``data`` of a config with all examples."""
        name = self._found(need)
        if self.embedded or name is None:
            return {"name": "digits"}
        return {"name": name, "directory": str(self.directory)}

    def _found(self, need: Need) -> str | None:
        if self.directory is None:
            return None
        folder = _io.expanded(self.directory)
        return next((name for file, name in need.places if (folder / file).is_file()), None)


class FigureRows(list[Row]):
    """The rows of cells; those of bounds have the columns method, rule, kind and epsilon.

    >>> rows = FigureRows([{"a": 1, "b": 2.0}, {"a": 3, "b": 4.0}, {"a": 3, "b": 6.0}])
    >>> rows.only(a=3).mean("b"), rows.values("a")
    (5.0, [1, 3])
    """

    def only(self, **wanted: float | int | str | None) -> Self:
        """Return the rows that have these values."""
        return self.where(lambda row: all(row.get(name) == value for name, value in wanted.items()))

    def where(self, is_wanted: Callable[[Row], bool]) -> Self:
        """Return the rows of which this is true."""
        return type(self)(row for row in self if is_wanted(row))

    def values(self, name: str) -> list[Any]:
        """Return the distinct values of a column, in the order in which they appear."""
        return list(dict.fromkeys(row[name] for row in self if row.get(name) is not None))

    def numbers(self, name: str) -> list[float]:
        """Return all numbers of a column; rows without one are skipped."""
        return [float(value) for row in self if (value := row.get(name)) is not None]

    def mean(self, name: str = "epsilon") -> float | None:
        """Return the mean of a column, None if it has no number."""
        column = self.numbers(name)
        return statistics.fmean(column) if column else None

    def spread(self, name: str = "epsilon") -> float:
        """Return the standard deviation of a column, 0 for a single value."""
        column = self.numbers(name)
        return statistics.stdev(column) if len(column) > 1 else 0.0

    def mean_text(self) -> str:
        """Return the mean epsilon for a table, or an empty string if there is none."""
        value = self.mean()
        return "" if value is None else f"{value:.2f}"

    def mean_cells(self, column: str, values: Iterable[float]) -> list[str]:
        """Return the mean epsilon at each of these values of a column, for the row of a table."""
        return [self.only(**{column: value}).mean_text() for value in values]

    def by_method(self) -> Iterator[tuple[str, Self]]:
        """Yield the label and the rows of each method with each threshold rule."""
        for method, rule in dict.fromkeys((str(row["method"]), str(row["rule"])) for row in self):
            yield method_label(method, rule), self.only(method=method, rule=rule)

    @property
    def kinds(self) -> dict[tuple[str, str], str]:
        """The kind of bound of each method with each threshold rule."""
        return {
            (str(row["method"]), str(row.get("rule") or "")): str(row["kind"])
            for row in self
            if row.get("kind") is not None and row.get("method") is not None
        }

    @property
    def rates(self) -> tuple[list[float], list[float]]:
        """The false positive and the false negative rates of a curve."""
        return self.numbers("fpr"), self.numbers("fnr")

    def rates_series(self, label: str, mark: Mark | None = None, every: int = 1) -> Series:
        """Return a curve of error rates with every ``every``-th point."""
        x, y = self.rates
        return Series(label=label, x=x[::every], y=y[::every], mark=mark or Mark.LINE)

    def series_over(self, axis: str) -> list[Series]:
        """Return the mean bound over a column, with the spread over runs, for each method and rule."""
        series = []
        for label, rows in self.by_method():
            values = sorted(rows.values(axis))
            mark = Mark.LINE if rows[0].get("kind") == "confidence" else Mark.DASHES
            series.append(rows._mean_series(axis, values, label=label, x=values, mark=mark))
        return series

    def bars(self, column: str, values: Sequence[float | str]) -> list[Series]:
        """Return the mean bounds of all methods at these values of a column as grouped bars."""
        return [
            rows._mean_series(column, values, label=label, x=range(len(values)), mark=Mark.BARS)
            for label, rows in self.by_method()
        ]

    def _mean_series(self, column: str, values: Sequence[float | str], **options: Any) -> Series:
        cells = [self.only(**{column: value}) for value in values]
        means, spreads = [cell.mean() or 0.0 for cell in cells], [cell.spread() for cell in cells]
        return Series(y=means, spread=spreads, **options)


def method_label(method: str, rule: str) -> str:
    """Return a method with its threshold rule, as in a legend."""
    return f"{method}, {rule}" if rule else method


def rates_rows(fpr: FloatArray, fnr: FloatArray) -> list[Row]:
    """Return the points of a trade-off curve as rows."""
    return [{"fpr": float(x), "fnr": float(y)} for x, y in zip(fpr, fnr, strict=True)]


class Mark(StrEnum):
    """How the points of a series are shown."""

    LINE = "line"
    DASHES = "dashes"
    TRUTH = "truth"  # the true value that the others estimate
    POINTS = "points"
    BARS = "bars"
    STEPS = "steps"  # a histogram: y[i] from x[i] to x[i + 1]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points, each with its spread in both directions."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    mark: Mark = Mark.LINE


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes; ``categories`` label the ticks 0, 1, ... of the x axis, ``level`` is the truth."""

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
    """Panels in rows of at most ``columns``."""

    panels: Sequence[Panel]
    columns: int = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers to print, such as those of the paper next to ours."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names_papers: bool = False
    """Whether to keep the paper's names of data even if other data replace them."""


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


def bounds_panel(rows: FigureRows, axis: str, label: str, level: float, **options: Any) -> Panel:
    """Return the bounds of all methods over a column, with the true value as a line."""
    return Panel(x_label=label, y_label=_BOUND, series=rows.series_over(axis), level=level, **options)


def bars_panel(
    rows: FigureRows,
    column: str,
    values: Sequence[float | str],
    level: float,
    *,
    x_label: str = "",
    **options: Any,
) -> Panel:
    """Return the mean bounds of all methods at these values of a column as grouped bars."""
    names = [value if isinstance(value, str) else f"{value:g}" for value in values]
    series = rows.bars(column, values)
    return Panel(x_label=x_label, y_label=_BOUND, series=series, categories=names, level=level, **options)


def epsilon_panel(series: Sequence[Series], epsilons: Sequence[float], title: str) -> Panel:
    """Return a panel of bounds over the theoretical epsilon, with the diagonal."""
    lines = [*series, diagonal(epsilons)]
    return Panel(title=title, x_label="theoretical epsilon", y_label=_BOUND, series=lines)


def diagonal(epsilons: Sequence[float]) -> Series:
    """Return the line of tight bounds."""
    return Series(label="theoretical", x=epsilons, y=epsilons, mark=Mark.TRUTH)


def comparison_table(
    rows: Sequence[Sequence[str]], title: str = "Comparison with the paper", *, names_papers: bool = False
) -> Table:
    """Return a table with the paper's value and ours for each quantity."""
    return Table(title=title, header=("", "paper", "here"), rows=rows, names_papers=names_papers)

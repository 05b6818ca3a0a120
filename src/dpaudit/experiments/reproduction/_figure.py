"""The description of a figure or table of the paper: its scales, cells, data, pictures and tables.

A :class:`Figure` is measured by ``reproduce``. Pictures and tables are plain values, which ``dpaudit.report``
draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dpaudit import _io
from dpaudit.errors import InputError

Key: TypeAlias = dict[str, float | int | str]
Row: TypeAlias = dict[str, float | int | str | None]
Rows: TypeAlias = Sequence[Row]
Settings: TypeAlias = Mapping[str, Any]


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
    def picture(self, rows: Rows, settings: Settings, /) -> Picture:
        """Return the picture to draw."""

    @abstractmethod
    def tables(self, rows: Rows, settings: Settings, /) -> Sequence[Table]:
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


def simulated(usual: Settings, **tiny: object) -> Mapping[Scale, Settings]:
    """Return settings of a simulation that a CPU runs at the paper's scale; ``tiny`` is for tests."""
    return {Scale.TINY: {**usual, **tiny}, Scale.CPU: usual, Scale.PAPER: usual}


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
    places: tuple[tuple[str, str], ...]
    """Pairs of a file in the data directory and the name of the data in configs."""


CIFAR10 = Need(
    "CIFAR-10",
    "cifar-10-batches-bin, the folder of the binary version of CIFAR-10 "
    "(https://www.cs.toronto.edu/~kriz/cifar.html)",
    (("cifar-10-batches-bin/data_batch_1.bin", "cifar10"), ("data_batch_1.bin", "cifar10")),
)
PURCHASE = Need(
    "Purchase",
    "purchase100.npz or dataset_purchase (Purchase-100), or else bangkok (Location; both are at "
    "https://github.com/privacytrustlab/datasets)",
    tuple((name, "purchase100") for name in ("purchase100.npz", "purchase100.csv", "dataset_purchase"))
    + tuple((name, "location") for name in ("location.npz", "location.csv", "bangkok")),
)


@dataclass(frozen=True)
class Data:
    """The source of data: the official files in a directory, or the digits that ship with dpaudit."""

    directory: Path | None = None
    embedded: bool = False

    def require(self, name: str, needs: Iterable[Need]) -> None:
        """Raise an error that names the missing files of a figure."""
        missing = [need.files for need in needs if not self.embedded and self._found(need) is None]
        if missing:
            where = "" if self.directory is None else f", got {self.directory} without them"
            raise InputError(
                f"Expected --data-dir with the official files that {name} needs{where}: "
                f"{' and '.join(missing)}; or pass --embedded to use the digits that come with dpaudit."
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

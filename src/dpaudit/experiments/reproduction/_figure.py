"""A table or figure of the paper, as a description.

What is drawn and what is printed, as plain data: who draws it is not known here. How large a reproduction is.
Which official files a figure needs, and what stands for them without. What a cell is given to work with.
Plain values: what cells are named by, what they measure, and what is asked of them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dpaudit import _io
from dpaudit.errors import InputError


@dataclass(frozen=True)
class Need:
    """Files of one data set; the first of several places that has one is taken."""

    paper: str
    """What the paper calls the data."""
    files: str
    places: tuple[tuple[str, str], ...]
    """A file in the data folder, and the name that configs have for the data."""


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
_OFFICIAL = frozenset({"cifar10", "purchase100"})


@dataclass(frozen=True)
class Data:
    """Where data come from: the official files in a folder, or what comes with dpaudit."""

    directory: Path | None = None
    embedded: bool = False

    def require(self, name: str, needs: Iterable[Need]) -> None:
        """Refuse a figure whose files are not there, with a sentence that says which."""
        missing = [need.files for need in needs if not self.embedded and self._found(need) is None]
        if missing:
            where = "" if self.directory is None else f", got {self.directory} without them"
            raise InputError(
                f"Expected --data-dir with the official files that {name} needs{where}: "
                f"{' and '.join(missing)}; or give --embedded, to use the digits that come with dpaudit."
            )

    def names(self, needs: Sequence[Need]) -> list[str]:
        """Which data are used, as a store tells them apart."""
        return ["digits"] if self.embedded and needs else [str(self._found(need)) for need in needs]

    def stand_ins(self, needs: Iterable[Need]) -> dict[str, str]:
        """How to call data that are not the paper's, by the paper's name for its own."""
        used = {need.paper: self.config(need)["name"] for need in needs}
        return {paper: f"{name} for {paper}" for paper, name in used.items() if name not in _OFFICIAL}

    def config(self, need: Need) -> dict[str, Any]:
        """The table ``data`` of a config, for all examples."""
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


class Scale(StrEnum):
    """From seconds to a machine with a GPU."""

    TINY = "tiny"  # for tests: every part runs, no number means anything
    CPU = "cpu"  # at most half an hour on two cores
    PAPER = "paper"  # the paper's own numbers of steps, models and observations


def simulated(usual: Settings, **tiny: object) -> Mapping[Scale, Settings]:
    """Settings of what a processor does at the paper's own scale; tests change some of them."""
    return {Scale.TINY: {**usual, **tiny}, Scale.CPU: usual, Scale.PAPER: usual}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One cell's settings, chance and place."""

    settings: Settings
    seed: int
    folder: Path
    """For what a training keeps, so that it goes on where it was interrupted."""
    data: Data
    device: str = "cpu"
    num_workers: int | None = None
    """Processes of a cell that has some: by default one for each core."""
    within: Callable[[str], None] = lambda _: None
    """Told how far the cell is."""

    def generator(self) -> np.random.Generator:
        """The cell's own chance, whichever cells were measured before it."""
        return np.random.default_rng(self.seed)


def cell_seed(seed: int, name: str, key: Key) -> int:
    """64 bits of a cell's own."""
    text = json.dumps([seed, name, key], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What the paper shows, and how it is measured again.

    The work is cut into ``cells``, each of which is kept when it is done. ``measure`` is given a cell's key
    and returns its rows; ``picture`` and ``tables`` are made of all rows.
    """

    name: str
    title: str
    paper: str
    """Where it is in the paper, and what it shows."""
    settings: Mapping[Scale, Settings]
    cells: Callable[[Settings], Sequence[Key]]
    measure: Callable[[Key, Work], list[Row]]
    picture: Callable[[Rows, Settings], Picture]
    tables: Callable[[Rows, Settings], Sequence[Table]]
    needs: tuple[Need, ...] = ()
    has_processes: bool = False
    """Whether a cell uses all cores by itself: then there is one cell at a time."""
    remarks: tuple[str, ...] = ()
    """What a reader has to know to compare it with the paper."""

    def described(self) -> dict[str, object]:
        """What it is, as plain values."""
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "data": [need.files for need in self.needs],
        }

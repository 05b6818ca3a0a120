"""Measure a figure, from its first cell to its tables; an interrupted one is resumed.

Finished cells are stored, each whole or not at all. A pool of processes measures several at a time. Where
other data than the paper's were used, everything that is shown says so.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _io
from dpaudit._io import difference, read_json
from dpaudit.errors import InputError
from dpaudit.experiments.reproduction._figure import (
    Data,
    Figure,
    Key,
    Panel,
    Picture,
    Row,
    Rows,
    Scale,
    Settings,
    Table,
    Work,
)
from dpaudit.experiments.reproduction._panels import kinds
from dpaudit.experiments.trials import Processes, Recipe, Task, Trial


class Cells:
    """The folder of a figure's cells. Each file says what it was made with: others are refused."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._folder, self._identity = folder, json.loads(json.dumps(identity))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else works on this figure here meanwhile."""
        with _io.locked(self._folder):
            yield

    def read(self, key: Key) -> tuple[list[Row], float] | None:
        """The rows of a finished cell and the seconds that it took; None if it is not."""
        path = self._file(key)
        if not path.exists():
            return None
        values = _read(path)
        other = difference(values["identity"], self._identity)
        if other is not None:
            raise InputError(
                f"Expected cells of this reproduction in {self._folder}, got those of another: {other}; "
                "give another --output."
            )
        return values["rows"], float(values["seconds"])

    def write(self, key: Key, rows: list[Row], seconds: float) -> None:
        """Keep a finished cell."""
        values = {"identity": self._identity, "key": key, "seconds": seconds, "rows": rows}
        _io.write_text(self._file(key), json.dumps(values, indent=1, allow_nan=False) + "\n")

    def place(self, key: Key) -> Path:
        """A folder for what the cell itself keeps."""
        return self._folder / _slug(key)

    def _file(self, key: Key) -> Path:
        return self._folder / f"{_slug(key)}.json"


def _slug(key: Key) -> str:
    """A name for files.

    >>> _slug({"epsilon": 1.0, "method": "f-DP (CP)"})
    'epsilon=1.0,method=f-DP-CP'
    """
    return ",".join(f"{name}={re.sub(r'[^A-Za-z0-9.]+', '-', str(key[name])).strip('-')}" for name in key)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
        if {"identity", "rows", "seconds"} <= values.keys():
            return values
    except InputError:
        pass
    raise InputError(f"Expected a cell of a reproduction in {path}, but it cannot be read; delete it.")


_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FigureRun:
    """The cells of a figure at a scale: which they are, how each is measured, and where it is stored."""

    figure: Figure
    output: Path
    scale: Scale
    data: Data
    seed: int
    device: str
    num_workers: int | None = None
    within: Callable[[str], None] = lambda _: None

    @property
    def settings(self) -> Settings:
        """Those of the figure at this scale."""
        return self.figure.settings[self.scale]

    @cached_property
    def keys(self) -> Sequence[Key]:
        """The keys of all cells."""
        return self.figure.cells(self.settings)

    @cached_property
    def cells(self) -> Cells:
        """The finished cells. Code is identified by its version: changes within one are not noticed."""
        identity = {
            "schema_version": _SCHEMA_VERSION,
            "dpaudit": dpaudit.__version__,
            "name": self.figure.name,
            "scale": str(self.scale),
            "seed": self.seed,
            "data": self.data.names(self.figure.needs),
            "settings": dict(self.settings),
        }
        return Cells(_io.expanded(self.output) / f"{self.figure.name}-cells", identity)

    @property
    def missing(self) -> list[int]:
        """The indices of the cells that are not finished."""
        return [place for place, key in enumerate(self.keys) if self.cells.read(key) is None]

    def measure(self, place: int) -> float:
        """Measure a cell and store it; return the seconds that it took."""
        key = self.keys[place]
        started = time.perf_counter()
        rows: list[Row] = [{**key, **row} for row in self.figure.measure(key, self._work(key))]
        seconds = time.perf_counter() - started
        self.cells.write(key, rows, seconds)
        return seconds

    def _work(self, key: Key) -> Work:
        return Work(
            settings=self.settings,
            seed=self._seed(key),
            folder=self.cells.place(key),
            data=self.data,
            device=self.device,
            num_workers=self.num_workers,
            within=self.within,
        )

    def _seed(self, key: Key) -> int:
        """Return 64 bits of the cell's own."""
        text = json.dumps([self.seed, self.figure.name, key], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def text(self, place: int) -> str:
        """Return a cell's key for people."""
        return ", ".join(f"{name} {value}" for name, value in self.keys[place].items())

    def finished(self) -> tuple[list[Row], float]:
        """Return the rows of all cells, and the seconds that they took together."""
        found = [stored for key in self.keys if (stored := self.cells.read(key)) is not None]
        return [row for rows, _ in found for row in rows], sum(seconds for _, seconds in found)

    def described(self) -> dict[str, Any]:
        """Return plain values from which another process makes the same, but for callbacks."""
        return {
            "name": self.figure.name,
            "output": str(self.output),
            "scale": str(self.scale),
            "directory": None if self.data.directory is None else str(self.data.directory),
            "embedded": self.data.embedded,
            "seed": self.seed,
            "device": self.device,
        }


_TINY = (
    "Scale tiny is there to see that everything works: its numbers mean nothing, and in the place of wide "
    "networks there is a ConvNet."
)


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """All rows of a figure, and what is drawn and printed from them."""

    figure: Figure
    scale: Scale
    seed: int
    data: tuple[str, ...]
    settings: Settings
    rows: tuple[Row, ...]
    picture: Picture
    tables: tuple[Table, ...]
    seconds: float
    """That all cells took together."""

    @property
    def kinds(self) -> dict[tuple[str, str], str]:
        """Of each method with each threshold rule, whether its numbers are sound."""
        return kinds(self.rows)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader has to know."""
        return (*((_TINY,) if self.scale is Scale.TINY else ()), *self.figure.remarks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.figure.described(),
            "scale": str(self.scale),
            "seed": self.seed,
            "used_data": list(self.data),
            "settings": dict(self.settings),
            "remarks": list(self.remarks),
            "seconds": round(self.seconds, 3),
            "methods": [
                {"method": method, "rule": rule, "kind": kind} for (method, rule), kind in self.kinds.items()
            ],
            "tables": [
                {"title": one.title, "header": list(one.header), "rows": [list(row) for row in one.rows]}
                for one in self.tables
            ],
            "rows": [dict(row) for row in self.rows],
        }


def reproduce(
    figure: Figure,
    *,
    output: Path,
    scale: Scale = Scale.CPU,
    data: Data | None = None,
    seed: int = 0,
    device: str = "cpu",
    pool: Processes | None = None,
    watch: Callable[[int, int, str], None] = lambda *_: None,
    within: Callable[[str], None] = lambda _: None,
) -> Reproduced:
    """Measure the cells that are missing, and return the whole figure.

    With a ``pool``, several cells are measured at a time; a figure that trains in processes itself has as
    many as the pool. ``watch`` is called with the number of finished cells, the number of all, and which one
    is measured now, or was by the pool; ``within`` with the progress of a cell in this process.
    """
    data = data or Data()
    data.require(figure.name, figure.needs)
    run = FigureRun(
        figure=figure,
        output=output,
        scale=scale,
        data=data,
        seed=seed,
        device=device,
        num_workers=1 if pool is None else pool.num_workers,
        within=within,
    )
    with run.cells.locked():
        _measure(run, None if figure.has_processes else pool, watch)
    rows, seconds = run.finished()
    labels = DataLabels(data.stand_ins(figure.needs))
    return Reproduced(
        figure=figure,
        scale=scale,
        seed=seed,
        data=tuple(data.names(figure.needs)),
        settings=run.settings,
        rows=tuple(labels.rows(rows)),
        picture=labels.picture(figure.picture(rows, run.settings)),
        tables=labels.tables(figure.tables(rows, run.settings)),
        seconds=seconds,
    )


def _measure(run: FigureRun, pool: Processes | None, watch: Callable[[int, int, str], None]) -> None:
    missing, total = run.missing, len(run.keys)
    if pool is not None and len(missing) > 1:
        _measure_pooled(run, pool, watch)
    else:
        for number, place in enumerate(missing):
            watch(total - len(missing) + number, total, run.text(place))
            run.measure(place)
    watch(total, total, "done")


def _measure_pooled(run: FigureRun, pool: Processes, watch: Callable[[int, int, str], None]) -> None:
    """Measure what is missing; a cell that fails does not keep the others from being measured."""
    missing, total = run.missing, len(run.keys)
    recipe = Recipe(target="dpaudit:figure-cells", arguments=run.described())
    groups = [(Trial(place, run.seed, present=False),) for place in missing]
    num_done, errors = total - len(missing), []
    watch(num_done, total, f"{len(missing)} to measure, several at a time")
    with closing(pool.map(Task.of(recipe), groups)) as results:
        for (trial,), finished in results:
            if finished.errors[0] is not None:
                errors.append(f"{run.text(trial.number)}: {_last_line(finished.errors[0])}")
                continue
            num_done += 1
            watch(num_done, total, run.text(trial.number))
    if errors:
        raise InputError(
            f"Expected {total} cells of {run.figure.name}, but {len(errors)} failed; the others are "
            f"kept. The first was {errors[0]}"
        )


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1]


def worker(
    *, name: str, output: str, scale: str, directory: str | None, embedded: bool, seed: int, device: str
) -> Callable[[Sequence[Trial]], list[float]]:
    """Return what a process does: a trial's number is the index of a cell, its score the seconds it took."""
    from dpaudit.experiments.reproduction.figures import figure_named  # noqa: PLC0415  # they import most of this

    run = FigureRun(
        figure=figure_named(name),
        output=Path(output),
        scale=Scale(scale),
        data=Data(None if directory is None else Path(directory), embedded),
        seed=seed,
        device=device,
    )
    return lambda trials: [run.measure(trial.number) for trial in trials]


class DataLabels:
    """Name the data that were used, such as "location for Purchase", in all that is shown.

    >>> DataLabels({"Purchase": "location for Purchase"}).rows([{"column": "Purchase", "epsilon": 1.0}])
    [{'column': 'location for Purchase', 'epsilon': 1.0}]
    """

    def __init__(self, stand_ins: Mapping[str, str]) -> None:
        self._stand_ins = stand_ins

    def rows(self, rows: Rows) -> list[Row]:
        """Return rows as they are written."""
        return [
            {name: self._text(value) if isinstance(value, str) else value for name, value in row.items()}
            for row in rows
        ]

    def picture(self, picture: Picture) -> Picture:
        """Return a picture as it is drawn."""
        return replace(picture, panels=[self._panel(panel) for panel in picture.panels])

    def tables(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        """Return tables as they are printed."""
        return tuple(self._table(table) for table in tables)

    def _text(self, text: str) -> str:
        for paper, used in self._stand_ins.items():
            text = text.replace(paper, used)
        return text

    def _texts(self, texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._text(text) for text in texts)

    def _panel(self, panel: Panel) -> Panel:
        return replace(
            panel,
            title=self._text(panel.title),
            categories=self._texts(panel.categories),
            series=[replace(one, label=self._text(one.label)) for one in panel.series],
        )

    def _table(self, table: Table) -> Table:
        if table.names_papers:
            return table
        rows = [self._texts(row) for row in table.rows]
        return replace(table, header=self._texts(table.header), rows=rows)

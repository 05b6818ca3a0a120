"""Reproduce a figure: measure its missing cells, and create its picture and tables.

Finished cells are stored atomically, so that an interrupted figure resumes. A pool of processes measures
several cells at a time. Labels name the data used if they are not the paper's.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpaudit
from dpaudit import _io
from dpaudit._io import JsonCache
from dpaudit.errors import IncompleteError, InputError
from dpaudit.experiments.reproduction import _figure as fig

if TYPE_CHECKING:  # only cells in processes need trials
    from dpaudit.experiments.trials import Processes, Trial


def reproduce(
    figure: fig.Figure,
    *,
    output: Path,
    scale: fig.Scale = fig.Scale.CPU,
    data: fig.Data | None = None,
    seed: int = 0,
    device: str = "cpu",
    pool: Processes | None = None,
    watch: Callable[[int, int, str], None] = lambda *_: None,
    within: Callable[[str], None] = lambda _: None,
) -> Reproduced:
    """Measure the missing cells and return the figure.

    A ``pool`` measures several cells at a time; a figure that trains in its own processes starts as many as
    the pool has. ``watch`` is called with the number of finished cells, the total number, and the current
    cell (with a pool, the last finished one); ``within``, with the progress of a cell in this process.
    """
    data = data or fig.Data()
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
    with _io.locked(run.cells.folder):
        _measure(run, None if figure.has_processes else pool, watch)
    rows, seconds = run.finished()
    stand_ins = data.stand_ins(figure.needs)
    return Reproduced(
        figure=figure,
        scale=scale,
        seed=seed,
        data=tuple(data.names(figure.needs)),
        settings=run.settings,
        rows=relabeled(rows, stand_ins),
        picture=relabeled(figure.picture(rows, run.settings), stand_ins),
        tables=tuple(relabeled(list(figure.tables(rows, run.settings)), stand_ins)),
        seconds=seconds,
    )


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """All rows of a figure, with its picture and tables."""

    figure: fig.Figure
    scale: fig.Scale
    seed: int
    data: tuple[str, ...]
    settings: fig.Settings
    rows: fig.FigureRows
    picture: fig.Picture
    tables: tuple[fig.Table, ...]
    seconds: float
    """The total time of all cells."""

    @property
    def kinds(self) -> dict[tuple[str, str], str]:
        """The kind of bound of each method with each threshold rule."""
        return self.rows.kinds

    @property
    def remarks(self) -> tuple[str, ...]:
        """Caveats about the comparison with the paper."""
        if self.scale is not fig.Scale.TINY:
            return self.figure.remarks
        return (
            "Scale tiny only checks that everything runs: its numbers are meaningless, and a ConvNet "
            "replaces wide networks.",
            *self.figure.remarks,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
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
                {
                    "title": table.title,
                    "header": list(table.header),
                    "rows": [list(row) for row in table.rows],
                }
                for table in self.tables
            ],
            "rows": [dict(row) for row in self.rows],
        }


def _measure(run: FigureRun, pool: Processes | None, watch: Callable[[int, int, str], None]) -> None:
    missing, total = run.missing, len(run.keys)
    if pool is not None and len(missing) > 1:
        _measure_pooled(run, pool, watch)
    else:
        for number, index in enumerate(missing):
            watch(total - len(missing) + number, total, run.label(index))
            run.measure(index)
    watch(total, total, "done")


def _measure_pooled(run: FigureRun, pool: Processes, watch: Callable[[int, int, str], None]) -> None:
    """Measure several cells at a time; failures are reported after the others have finished."""
    from dpaudit.experiments.trials import Recipe, Task, Trial  # noqa: PLC0415

    missing, total = run.missing, len(run.keys)
    recipe = Recipe(target="dpaudit:figure-cells", arguments=run.described())
    groups = [(Trial(index, run.seed, present=False),) for index in missing]
    num_done, errors, is_bad_input = total - len(missing), [], True
    watch(num_done, total, f"{len(missing)} to measure, several at a time")
    with closing(pool.map(Task.of(recipe), groups)) as results:
        for (trial,), finished in results:
            _io.require_lock(run.cells.folder)  # the workers write without one
            if finished.errors[0] is not None:
                last = finished.errors[0].strip().splitlines()[-1]
                is_bad_input = is_bad_input and last.startswith("dpaudit.errors.")
                errors.append(f"{run.label(trial.number)}: {last}")
                continue
            num_done += 1
            watch(num_done, total, run.label(trial.number))
    if errors:
        raise (InputError if is_bad_input else IncompleteError)(
            f"{len(errors)} of {total} cells of {run.figure.name} failed; the others are stored. The first "
            f"failure was {errors[0]}"
        )


@dataclass(frozen=True, kw_only=True)
class FigureRun:
    """The cells of a figure at a scale: their keys, how each is measured, and where it is stored."""

    figure: fig.Figure
    output: Path
    scale: fig.Scale
    data: fig.Data
    seed: int
    device: str
    num_workers: int | None = None
    within: Callable[[str], None] = lambda _: None

    @property
    def settings(self) -> fig.Settings:
        """The settings of the figure at this scale."""
        return self.figure.settings[self.scale]

    @cached_property
    def keys(self) -> Sequence[fig.Key]:
        """The keys of all cells."""
        return self.figure.cells(self.settings)

    @cached_property
    def cells(self) -> JsonCache:
        """The finished cells, which record the version of dpaudit but not its code."""
        identity = {
            "schema_version": 1,
            "dpaudit": dpaudit.__version__,
            "name": self.figure.name,
            "scale": str(self.scale),
            "seed": self.seed,
            "data": self.data.names(self.figure.needs),
            "settings": dict(self.settings),
        }
        return _finished_cells(_io.expanded(self.output) / f"{self.figure.name}-cells", identity)

    @property
    def missing(self) -> list[int]:
        """The indices of the unfinished cells."""
        return [index for index, key in enumerate(self.keys) if self.cells.read(_slug(key)) is None]

    def measure(self, index: int) -> float:
        """Measure and store a cell, and return its duration in seconds."""
        key = self.keys[index]
        started = time.perf_counter()
        rows: list[fig.Row] = [{**key, **row} for row in self.figure.measure(key, self._work(key))]
        seconds = time.perf_counter() - started
        self.cells.write(_slug(key), {"key": key, "seconds": seconds, "rows": rows})
        return seconds

    def _work(self, key: fig.Key) -> fig.Work:
        text = json.dumps([self.seed, self.figure.name, key], sort_keys=True)
        return fig.Work(
            settings=self.settings,
            seed=int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"),
            folder=self.cells.folder / _slug(key),
            data=self.data,
            device=self.device,
            num_workers=self.num_workers,
            within=self.within,
        )

    def label(self, index: int) -> str:
        """Return the key of a cell as text for messages."""
        return ", ".join(f"{name} {value}" for name, value in self.keys[index].items())

    def finished(self) -> tuple[fig.FigureRows, float]:
        """Return the rows of all cells and their total time in seconds."""
        cells = [stored for key in self.keys if (stored := self.cells.read(_slug(key))) is not None]
        rows = fig.FigureRows(row for cell in cells for row in cell["rows"])
        return rows, sum(float(cell["seconds"]) for cell in cells)

    def described(self) -> dict[str, Any]:
        """Return the arguments with which :func:`worker` recreates this run in another process."""
        return {
            "name": self.figure.name,
            "output": str(self.output),
            "scale": str(self.scale),
            "directory": None if self.data.directory is None else str(self.data.directory),
            "embedded": self.data.embedded,
            "seed": self.seed,
            "device": self.device,
        }


def _finished_cells(folder: Path, identity: dict[str, Any]) -> JsonCache:
    """Return the cache of finished cells of a figure with this identity."""
    keys, content = ("key", "seconds", "rows"), "a cell of a reproduction"
    return JsonCache(folder, {"identity": identity}, keys=keys, content=content, indent=1)


def _slug(key: fig.Key) -> str:
    """Return the file name of a cell, without its suffix.

    >>> _slug({"epsilon": 1.0, "method": "f-DP (CP)"})
    'epsilon=1.0,method=f-DP-CP'
    """
    return ",".join(f"{name}={re.sub(r'[^A-Za-z0-9.]+', '-', str(key[name])).strip('-')}" for name in key)


def worker(
    *, name: str, output: str, scale: str, directory: str | None, embedded: bool, seed: int, device: str
) -> Callable[[Sequence[Trial]], list[float]]:
    """Return the scorer of a worker: the number of a trial is a cell index, its score the cell's duration."""
    from dpaudit.experiments.reproduction.figures import figure_named  # noqa: PLC0415  # avoids an import cycle

    run = FigureRun(
        figure=figure_named(name),
        output=Path(output),
        scale=fig.Scale(scale),
        data=fig.Data(None if directory is None else Path(directory), embedded),
        seed=seed,
        device=device,
    )
    return lambda trials: [run.measure(trial.number) for trial in trials]


def relabeled(value: Any, stand_ins: Mapping[str, str]) -> Any:
    """Replace the paper's names of data by those of the data used, in rows, pictures and tables.

    >>> relabeled([{"column": "Purchase", "epsilon": 1.0}], {"Purchase": "location for Purchase"})
    [{'column': 'location for Purchase', 'epsilon': 1.0}]
    """
    if isinstance(value, Mapping):
        return {name: relabeled(inner, stand_ins) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(relabeled(inner, stand_ins) for inner in value)
    if isinstance(value, fig.Picture | fig.Panel | fig.Series | fig.Table) and not getattr(
        value, "names_papers", False
    ):
        return replace(value, **relabeled(vars(value), stand_ins))
    if isinstance(value, str) and not isinstance(value, fig.Mark):
        for paper, used in stand_ins.items():
            value = value.replace(paper, used)
    return value

"""A figure from its first cell to its tables; goes on where it was interrupted."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit.errors import InputError
from dpaudit.experiments.reproduction._cells import Cells
from dpaudit.experiments.reproduction._data import Data
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._picture import Picture, Table
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._values import Key, Row, Settings, kinds
from dpaudit.experiments.reproduction._work import Work, cell_seed
from dpaudit.experiments.reproduction.figures import FIGURES

__all__ = ["Reproduced", "figure_named", "reproduce"]

_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """All rows of a figure, and what is drawn and printed of them."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.figure.described(),
            "scale": str(self.scale),
            "seed": self.seed,
            "used_data": list(self.data),
            "settings": dict(self.settings),
            "remarks": list(self.figure.remarks),
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


def figure_named(name: str) -> Figure:
    """The figure of this name."""
    known = {figure.name: figure for figure in FIGURES}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"{', '.join(known)}."
    raise InputError(f"Expected the name of a figure or table, got {name!r}: {hint}")


def reproduce(
    figure: Figure,
    *,
    output: Path,
    scale: Scale = Scale.CPU,
    data: Data | None = None,
    seed: int = 0,
    device: str = "cpu",
    watch: Callable[[int, int, str], None] = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> Reproduced:
    """Measure what is not measured yet, and put all together.

    ``watch`` is told how many cells of how many are done, and which one is measured now; ``say`` what a
    cell does.
    """
    data = data or Data()
    data.require(figure.name, figure.needs)
    settings, used = figure.settings[scale], tuple(data.names(figure.needs))
    identity = {
        "schema_version": _SCHEMA_VERSION,
        "dpaudit": dpaudit.__version__,
        "name": figure.name,
        "scale": str(scale),
        "seed": seed,
        "data": list(used),
        "settings": dict(settings),
    }
    cells = Cells(output.expanduser() / f"{figure.name}-cells", identity)

    def work(key: Key) -> Work:
        own = cell_seed(seed, figure.name, key)
        return Work(settings=settings, seed=own, folder=cells.place(key), data=data, device=device, say=say)

    with cells.locked():
        rows, seconds = _measured(figure, figure.cells(settings), cells, work, watch)
    return Reproduced(
        figure=figure,
        scale=scale,
        seed=seed,
        data=used,
        settings=settings,
        rows=tuple(rows),
        picture=figure.picture(rows, settings),
        tables=tuple(figure.tables(rows, settings)),
        seconds=seconds,
    )


def _measured(
    figure: Figure,
    keys: Sequence[Key],
    cells: Cells,
    work: Callable[[Key], Work],
    watch: Callable[[int, int, str], None],
) -> tuple[list[Row], float]:
    rows: list[Row] = []
    seconds = 0.0
    for number, key in enumerate(keys):
        stored = cells.read(key)
        if stored is None:
            watch(number, len(keys), ", ".join(f"{name} {value}" for name, value in key.items()))
            started = time.perf_counter()
            found = [{**key, **row} for row in figure.measure(key, work(key))]
            stored = found, time.perf_counter() - started
            cells.write(key, *stored)
        rows += stored[0]
        seconds += stored[1]
    watch(len(keys), len(keys), "done")
    return rows, seconds

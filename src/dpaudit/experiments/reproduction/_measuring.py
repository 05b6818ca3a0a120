"""The cells of a figure at a scale: which they are, how each is measured, and where it is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _files
from dpaudit.experiments.reproduction._cells import Cells
from dpaudit.experiments.reproduction._data import Data
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._values import Key, Row, Settings
from dpaudit.experiments.reproduction._work import Work, cell_seed

__all__ = ["Measuring"]

_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """All that the rows of a figure follow from."""

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
        """Of the figure at this scale."""
        return self.figure.settings[self.scale]

    @cached_property
    def keys(self) -> Sequence[Key]:
        """Of all cells."""
        return self.figure.cells(self.settings)

    @cached_property
    def cells(self) -> Cells:
        """Those that are finished. Code is told apart by its version: changes within one are not seen."""
        identity = {
            "schema_version": _SCHEMA_VERSION,
            "dpaudit": dpaudit.__version__,
            "name": self.figure.name,
            "scale": str(self.scale),
            "seed": self.seed,
            "data": self.data.names(self.figure.needs),
            "settings": dict(self.settings),
        }
        return Cells(_files.expanded(self.output) / f"{self.figure.name}-cells", identity)

    @property
    def missing(self) -> list[int]:
        """The places of the cells that are not finished."""
        return [place for place, key in enumerate(self.keys) if self.cells.read(key) is None]

    def measure(self, place: int) -> float:
        """Measure a cell and keep it; the seconds that it took."""
        key = self.keys[place]
        started = time.perf_counter()
        rows: list[Row] = [{**key, **row} for row in self.figure.measure(key, self._work(key))]
        seconds = time.perf_counter() - started
        self.cells.write(key, rows, seconds)
        return seconds

    def _work(self, key: Key) -> Work:
        return Work(
            settings=self.settings,
            seed=cell_seed(self.seed, self.figure.name, key),
            folder=self.cells.place(key),
            data=self.data,
            device=self.device,
            num_workers=self.num_workers,
            within=self.within,
        )

    def text(self, place: int) -> str:
        """A cell for people."""
        return ", ".join(f"{name} {value}" for name, value in self.keys[place].items())

    def finished(self) -> tuple[list[Row], float]:
        """The rows of all cells, and the seconds that they took together."""
        found = [stored for key in self.keys if (stored := self.cells.read(key)) is not None]
        return [row for rows, _ in found for row in rows], sum(seconds for _, seconds in found)

    def described(self) -> dict[str, Any]:
        """Plain values from which another process makes the same, but for who is told."""
        return {
            "name": self.figure.name,
            "output": str(self.output),
            "scale": str(self.scale),
            "directory": None if self.data.directory is None else str(self.data.directory),
            "embedded": self.data.embedded,
            "seed": self.seed,
            "device": self.device,
        }

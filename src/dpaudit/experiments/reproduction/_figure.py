"""A table or figure of the paper, as a description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dpaudit.experiments.reproduction._data import Need
from dpaudit.experiments.reproduction._picture import Picture, Table
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings
from dpaudit.experiments.reproduction._work import Work

__all__ = ["Figure"]


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

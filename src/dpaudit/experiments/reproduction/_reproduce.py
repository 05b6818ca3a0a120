"""A figure from its first cell to its tables; goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpaudit.experiments.reproduction._data import Data
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._labels import Labels
from dpaudit.experiments.reproduction._measuring import Measuring
from dpaudit.experiments.reproduction._picture import Picture, Table
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._values import Row, Settings, kinds

if TYPE_CHECKING:
    from dpaudit.experiments.trials import Processes

__all__ = ["Reproduced", "reproduce"]

_TINY = (
    "Scale tiny is there to see that everything works: its numbers mean nothing, and in the place of wide "
    "networks there is a ConvNet."
)


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
    """Measure what is not measured yet, and put all together.

    With a ``pool``, several cells are measured at a time; a figure that trains in processes itself has as
    many as the pool. ``watch`` is told how many cells of how many are done, and which one is measured now,
    or was by the pool; ``within`` how far a cell is that is measured in this process.
    """
    data = data or Data()
    data.require(figure.name, figure.needs)
    measuring = Measuring(
        figure=figure,
        output=output,
        scale=scale,
        data=data,
        seed=seed,
        device=device,
        num_workers=1 if pool is None else pool.num_workers,
        within=within,
    )
    with measuring.cells.locked():
        _measure(measuring, None if figure.has_processes else pool, watch)
    rows, seconds = measuring.finished()
    labels = Labels(data.stand_ins(figure.needs))
    return Reproduced(
        figure=figure,
        scale=scale,
        seed=seed,
        data=tuple(data.names(figure.needs)),
        settings=measuring.settings,
        rows=tuple(labels.rows(rows)),
        picture=labels.picture(figure.picture(rows, measuring.settings)),
        tables=labels.tables(figure.tables(rows, measuring.settings)),
        seconds=seconds,
    )


def _measure(measuring: Measuring, pool: Processes | None, watch: Callable[[int, int, str], None]) -> None:
    missing, total = measuring.missing, len(measuring.keys)
    if pool is not None and len(missing) > 1:
        from dpaudit.experiments.reproduction._pooled import measure_pooled  # noqa: PLC0415

        measure_pooled(measuring, pool, watch)
    else:
        for number, place in enumerate(missing):
            watch(total - len(missing) + number, total, measuring.text(place))
            measuring.measure(place)
    watch(total, total, "done")

"""A record of what every reproduced figure shows at the tiny scale.

Run this file to write the record again after a deliberate change of a figure.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dpaudit.experiments.reproduction import FIGURES, Data, Reproduced, Scale, reproduce
from dpaudit.experiments.reproduction._figure import Panel, Series, Table

PATH = Path(__file__).parent.parent / "fixtures" / "reproduction.json"
_KNOWN = "", "paper", "method", "kind", "epsilon", "training", "canary", "models"  # before any training run
_NUMBER = re.compile(r"^(yes|no)$|\d+(?=\.\d)|(?<=\.\d)\d|(?<=\.)\d")


def names() -> list[str]:
    """Return the names of all recorded figures."""
    return list(json.loads(PATH.read_text()))


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())[name]
    return found


def outline(found: Reproduced) -> dict[str, Any]:
    """Return the settings of all scales, the text, axes and marks of the picture, and the tables."""
    trained = bool(found.figure.needs)
    return {
        "settings": json.loads(json.dumps({str(scale): one for scale, one in found.figure.settings.items()})),
        "columns": found.picture.columns,
        "fields": sorted({name for row in found.rows for name in row}),
        "rows": len(found.rows),
        "panels": [_panel(panel) for panel in found.picture.panels],
        "tables": [_table(table, trained=trained) for table in found.tables],
    }


def numbers(found: Reproduced) -> list[float]:
    """Return the ends, means and spreads of all series; none if a network was trained for them."""
    if found.figure.needs:
        return []
    series = [one for panel in found.picture.panels for one in panel.series]
    return [number for one in series for number in _numbers(one)]


def _numbers(one: Series) -> tuple[float, ...]:
    weights = 1 + np.arange(len(one.y))
    return one.x[0], one.x[-1], float(np.average(one.y, weights=weights)), float(np.mean(one.spread or 0.0))


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "text": [panel.title, panel.x_label, panel.y_label, panel.level_label],
        "categories": list(panel.categories),
        "level": None if panel.level is None else f"{panel.level:.4g}",
        "log_x": panel.log_x,
        "ranges": [None if one is None else list(one) for one in (panel.x_range, panel.y_range)],
        "series": [[one.label, str(one.mark), len(one.x), one.spread is not None] for one in panel.series],
    }


def _table(table: Table, *, trained: bool) -> dict[str, Any]:
    rows = [
        [
            _cell(cell, measured=trained and name not in _KNOWN)
            for name, cell in zip(table.header, row, strict=True)
        ]
        for row in table.rows
    ]
    return {"title": table.title, "header": list(table.header), "rows": rows}


def _cell(cell: str, *, measured: bool) -> str:
    """Return a cell; if networks were trained for it, without its number, which depends on the platform."""
    if not measured:
        return cell
    own, slash, papers = cell.partition(" / ")
    return _NUMBER.sub("#", own) + slash + papers


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = [
            reproduce(figure, output=Path(folder), scale=Scale.TINY, data=Data(embedded=True))
            for figure in FIGURES
        ]
    values = {one.figure.name: {"outline": outline(one), "numbers": numbers(one)} for one in made}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(values.items())]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

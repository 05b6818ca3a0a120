"""A reproduced figure as files: rows as CSV, a picture, and a page that sets it beside the paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from operator import methodcaller
from pathlib import Path

from dpaudit import _io
from dpaudit._plotting import draw_picture, require_plotting
from dpaudit.experiments.reproduction import Picture, Reproduced, Scale, Table

__all__ = ["require_plotting", "write_reproduced"]

_FORMATS = "png", "svg"
_MEANING = {
    "confidence": "sound where what it assumes holds: exceeds the truth in 5 % of runs at most",
    "credible": "not a confidence bound: a posterior probability",
    "heuristic": "not sound: nothing is known of its error rate",
}
_CHOSEN = (
    "The paper prints no learning rates, and of Purchase neither steps nor batches; those here are ours. So "
    "is the number of trainings but for the ten of the figure in section 6.2."
)


def write_reproduced(found: Reproduced, folder: Path) -> list[Path]:
    """Write rows, page and picture; return their paths."""
    folder = _io.expanded(folder)
    _io.make_folder(folder)
    contents = {"csv": _csv(found).encode(), "md": _page(found).encode(), **_drawn(found.picture)}
    paths = [folder / f"{found.figure.name}.{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        _io.write(path, methodcaller("write", content))
    return paths


def _csv(found: Reproduced) -> str:
    """Return all rows, with a column for each name that any of them has."""
    names = list(dict.fromkeys(name for row in found.rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.rows)
    return file.getvalue()


def _drawn(picture: Picture) -> dict[str, bytes]:
    made = {name: io.BytesIO() for name in _FORMATS}
    draw_picture(picture, {**made})
    return {name: file.getvalue() for name, file in made.items()}


def _page(found: Reproduced) -> str:
    """Return what the paper shows, the tables, which numbers are sound, and how they were measured."""
    figure = found.figure
    blocks = [
        f"# {figure.title}",
        figure.paper,
        f"![{figure.title}]({figure.name}.svg)",
        *(part for table in found.tables for part in _table(table)),
        *_kinds(found),
        *found.remarks,
        _made(found),
    ]
    return "\n\n".join(blocks) + "\n"


def _table(table: Table) -> list[str]:
    return [f"**{table.title}**", _grid(table.header, table.rows)]


def _kinds(found: Reproduced) -> list[str]:
    rows = [(method, rule, kind, _MEANING[kind]) for (method, rule), kind in found.kinds.items()]
    if not rows:
        return []
    return ["**Which numbers are sound**", _grid(("method", "threshold", "kind", "meaning"), rows)]


def _made(found: Reproduced) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in found.settings.items())
    data = f" Data: {', '.join(found.data)}." if found.data else ""
    chosen = f" {_CHOSEN}" if found.data and found.scale is Scale.PAPER else ""
    return (
        f"Scale {found.scale}, seed {found.seed}, {found.seconds:.0f} seconds of all cells together. "
        f"Settings: {settings}.{data}{chosen}"
    )


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)

"""A reproduced figure as files: rows as CSV, a picture, and a page that compares it with the paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from operator import methodcaller
from pathlib import Path

from dpaudit import _io
from dpaudit._plotting import draw_picture, require_plotting
from dpaudit.experiments.reproduction import Reproduced, Scale
from dpaudit.stats import Kind

__all__ = ["require_plotting", "write_reproduced"]

_FORMATS = "png", "svg"
_CHOSEN = (
    "The paper gives no learning rates, and neither steps nor batch sizes for Purchase. We chose these, and "
    "the number of training runs, except for the ten runs of the figure in section 6.2."
)


def write_reproduced(found: Reproduced, folder: Path) -> list[Path]:
    """Write rows, page and picture; return their paths."""
    folder = _io.expanded(folder)
    _io.make_folder(folder)
    contents = {"csv": _csv(found).encode(), "md": _page(found).encode(), **_drawn(found)}
    paths = [folder / f"{found.figure.name}.{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        _io.write(path, methodcaller("write", content))
    return paths


def _csv(found: Reproduced) -> str:
    """Return all rows as CSV, with a column for each name that occurs in any of them."""
    names = list(dict.fromkeys(name for row in found.rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found.rows)
    return file.getvalue()


def _drawn(found: Reproduced) -> dict[str, bytes]:
    files = {name: io.BytesIO() for name in _FORMATS}
    draw_picture(found.picture, {**files})
    return {name: file.getvalue() for name, file in files.items()}


def _page(found: Reproduced) -> str:
    """Return a page with the paper's result, the tables, the kinds of bounds, and the settings."""
    figure = found.figure
    blocks = [
        f"# {figure.title}",
        figure.paper,
        f"![{figure.title}]({figure.name}.svg)",
        *(f"**{table.title}**\n\n{_grid(table.header, table.rows)}" for table in found.tables),
        *_kinds(found),
        *found.remarks,
        _provenance(found),
    ]
    return "\n\n".join(blocks) + "\n"


def _kinds(found: Reproduced) -> list[str]:
    rows = [(method, rule, kind, Kind(kind).meaning) for (method, rule), kind in found.kinds.items()]
    if not rows:
        return []
    return ["**Which numbers are sound**", _grid(("method", "threshold", "kind", "meaning"), rows)]


def _provenance(found: Reproduced) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in found.settings.items())
    data = f" Data: {', '.join(found.data)}." if found.data else ""
    chosen = f" {_CHOSEN}" if found.data and found.scale is Scale.PAPER else ""
    return (
        f"Scale {found.scale}, seed {found.seed}, {found.seconds:.0f} seconds for all cells. "
        f"Settings: {settings}.{data}{chosen}"
    )


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)

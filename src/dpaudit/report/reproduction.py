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


def write_reproduced(found: Reproduced, folder: Path) -> list[Path]:
    """Write rows, page and picture; return their paths."""
    folder = _io.expanded(folder)
    _io.make_folder(folder)
    contents = {"csv": _csv(found).encode(), "md": _page(found).encode(), **_drawn(found)}
    paths = [folder / f"{found.figure.name}.{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        _io.write(path, methodcaller("write", content))
    return paths


def _csv(reproduced: Reproduced) -> str:
    """Return all rows as CSV, with a column for each name that occurs in any of them."""
    names = list(dict.fromkeys(name for row in reproduced.rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(reproduced.rows)
    return file.getvalue()


def _drawn(reproduced: Reproduced) -> dict[str, bytes]:
    files = {name: io.BytesIO() for name in ("png", "svg")}
    draw_picture(reproduced.picture, {**files})
    return {name: file.getvalue() for name, file in files.items()}


def _page(reproduced: Reproduced) -> str:
    """Return a page with the paper's result, the tables, the kinds of bounds, and the settings."""
    figure = reproduced.figure
    blocks = [
        f"# {figure.title}",
        figure.paper,
        f"![{figure.title}]({figure.name}.svg)",
        *(f"**{table.title}**\n\n{_grid(table.header, table.rows)}" for table in reproduced.tables),
        *_kinds(reproduced),
        *reproduced.remarks,
        _provenance(reproduced),
    ]
    return "\n\n".join(blocks) + "\n"


def _kinds(reproduced: Reproduced) -> list[str]:
    rows = [(method, rule, kind, Kind(kind).meaning) for (method, rule), kind in reproduced.kinds.items()]
    if not rows:
        return []
    return ["**Which numbers are sound**", _grid(("method", "threshold", "kind", "meaning"), rows)]


def _provenance(reproduced: Reproduced) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in reproduced.settings.items())
    data = f" Data: {', '.join(reproduced.data)}." if reproduced.data else ""
    chosen = ""
    if reproduced.data and reproduced.scale is Scale.PAPER:
        chosen = (
            " The paper gives no learning rates, and neither steps nor batch sizes for Purchase. We chose "
            "these, and the number of training runs, except for the ten runs of the figure in section 6.2."
        )
    return (
        f"Scale {reproduced.scale}, seed {reproduced.seed}, {reproduced.seconds:.0f} seconds for all cells. "
        f"Settings: {settings}.{data}{chosen}"
    )


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)

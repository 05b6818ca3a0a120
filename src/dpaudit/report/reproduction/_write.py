"""The files of a reproduced figure."""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path
from typing import BinaryIO

from dpaudit import _files
from dpaudit._plotting import draw_picture
from dpaudit.experiments.reproduction import Picture, Reproduced
from dpaudit.report.reproduction._page import page

__all__ = ["write_reproduced"]

_FORMATS = "png", "svg"


def write_reproduced(found: Reproduced, folder: Path) -> list[Path]:
    """Write data, picture and page; returns where they are."""
    folder = _files.expanded(folder)
    _files.make_folder(folder)
    texts, drawn = {"csv": _csv(found), "md": page(found)}, _drawn(found.picture)
    for suffix, text in texts.items():
        _files.write_text(folder / f"{found.figure.name}.{suffix}", text)
    for suffix, content in drawn.items():
        _files.write(folder / f"{found.figure.name}.{suffix}", partial(_fill, content))
    return [folder / f"{found.figure.name}.{suffix}" for suffix in (*texts, *_FORMATS)]


def _fill(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _csv(found: Reproduced) -> str:
    """All rows; a column for each name that any of them has."""
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

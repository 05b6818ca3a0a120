"""Pictures of the evidence, as SVG with a light and a dark version in one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Grid", "dots", "heat_map"]

# the background is drawn, so that a page in the other color scheme stays readable
_STYLE = """<style>
.page{fill:#fff}.text{fill:#1f2328}.muted{fill:#59636e}.line{stroke:#d8dee4}.limit{stroke:#59636e}
.dots{stroke:#0969da}.wrong{stroke:#cf222e}.high{fill:#0969da}.miss{fill:#cf222e}.none{fill:#eaeef2}.on{fill:#fff}
@media (prefers-color-scheme: dark){.page{fill:#161b22}.text{fill:#e6edf3}.muted{fill:#9198a1}
.line{stroke:#3d444d}.limit{stroke:#9198a1}.dots{stroke:#58a6ff}.wrong{stroke:#ff7b72}.high{fill:#1f6feb}
.miss{fill:#da3633}.none{fill:#21262d}}
text{font:13px system-ui,sans-serif}
.dots,.wrong{stroke-width:5;stroke-linecap:round;stroke-opacity:.55;fill:none}
</style>"""
_ROW = 24


def _svg(width: int, height: int, title: str, elements: Iterator[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = f'<rect class="page" width="{width}" height="{height}" rx="6"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", _STYLE, page, *elements, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "text", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def dots(title: str, axis: str, rows: dict[str, list[tuple[float, bool]]], limit: float, end: int) -> str:
    """Draw a row of dots for each name, red where the second value is true; dash a line at the limit."""
    left, width, top = 330, 900, 34
    bottom = top + _ROW * len(rows)

    def place(value: float) -> float:
        return left + (width - left - 30) * value / end

    def elements() -> Iterator[str]:
        for tick in range(end + 1):
            dashed = ' stroke-dasharray="5 4"' if tick == limit else ""
            kind = "limit" if tick == limit else "line"
            yield f'<path class="{kind}" d="M{place(tick):.1f} {top - 8}V{bottom}"{dashed}/>'
            yield _text(place(tick), bottom + 18, f"{tick} %", "muted", "middle")
        yield _text(place(limit), top - 14, f"allowed: {limit:g} %", "muted", "middle")
        for number, (name, values) in enumerate(rows.items()):
            middle = top + _ROW * number + _ROW / 2
            yield _text(left - 60, middle + 4, name, "text", "end")
            yield _text(left - 18, middle + 4, str(len(values)), "muted", "end")
            for kind, is_wrong in (("dots", False), ("wrong", True)):
                marks = [
                    f"M{place(min(value, end)):.1f} {middle + (index * 7 % 13 - 6):g}h0"
                    for index, (value, wrong) in enumerate(values)
                    if wrong == is_wrong
                ]
                if marks:
                    yield f'<path class="{kind}" d="{"".join(marks)}"/>'
        yield _text((left + width - 30) / 2, bottom + 40, axis, "muted", "middle")

    return _svg(width, bottom + 54, title, elements())


@dataclass(frozen=True)
class Grid:
    """A block of a heat map: rows of shares, each with its text; ``None`` cannot be measured."""

    title: str
    rows: Sequence[tuple[str, Sequence[tuple[float, str] | None]]]


def heat_map(title: str, columns: Sequence[str], grids: Sequence[Grid]) -> str:
    """Draw shares of 0 to 1 as cells: blue from 0.9 on, and red, paler the more was detected, below."""
    left, cell, top = 560, 84, 50
    width = left + cell * len(columns) + 16

    def elements() -> Iterator[str]:
        for number, name in enumerate(columns):
            for line, words in enumerate(name.split(" ", 1)):
                yield _text(left + cell * (number + 0.5), 22 + 16 * line, words, "muted", "middle")
        y = top
        for grid in grids:
            yield _text(16, y + 18, grid.title, "muted")
            y += _ROW
            for name, cells in grid.rows:
                yield _text(left - 12, y + 17, name, "text", "end")
                yield from _cells(cells, y)
                y += _ROW
            y += 6

    def _cells(cells: Sequence[tuple[float, str] | None], y: int) -> Iterator[str]:
        for number, entry in enumerate(cells):
            x = left + cell * number
            kind = "none" if entry is None else "high" if entry[0] >= 0.9 else "miss"
            strength = 1.0 if entry is None or kind == "high" else 1 - 0.5 * entry[0]
            yield (
                f'<rect class="{kind}" x="{x + 1}" y="{y + 1}" width="{cell - 2}" height="{_ROW - 2}" rx="3"'
                f' fill-opacity="{strength:.2g}"/>'
            )
            if entry is not None:
                yield _text(x + cell / 2, y + 17, entry[1], "on", "middle")

    height = top + sum(_ROW * (len(grid.rows) + 1) + 6 for grid in grids) + 12
    return _svg(width, height, title, elements())

"""The bounds of all methods beside each other, with the claim."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpaudit._markup import Html, element, joined
from dpaudit.report._bounds import BoundValues, ClaimValues
from dpaudit.report.plots._canvas import WIDTH, Canvas
from dpaudit.report.plots._figure import figure, key, table
from dpaudit.report.plots._scale import Scale, number

__all__ = ["methods_figure"]

_ROW = 24
_NAMES, _NUMBERS = 168, 52  # room for text on the left and on the right
_RULES = {
    "Simultaneous": "bands",
    "Predictable": "predictable",
    "SameData": "same data",
    "HeldOut": "held out",
}


def methods_figure(verdict: BoundValues, methods: Sequence[BoundValues], claim: ClaimValues) -> Html:
    """A bar a method: what lies under it is refuted. The verdict's own bound comes first."""
    rows = [verdict, *(row for row in methods if row.whole is not None)]
    ends = [row.whole for row in rows if row.whole is not None and math.isfinite(row.whole)]
    most = 1.05 * max([*ends, claim.epsilon if math.isfinite(claim.epsilon) else 0.0, 1e-9])
    height = _ROW * len(rows) + 50
    canvas = Canvas(Scale(0.0, most, _NAMES, WIDTH - _NUMBERS), Scale(0.0, 1.0, height - 46, 4), height)
    picture = canvas.svg(
        _axis(canvas),
        joined(_row(canvas, row, place, row is verdict) for place, row in enumerate(rows)),
        canvas.vertical(claim.epsilon, "line claim"),
        joined(_hit(row, place) for place, row in enumerate(rows)),
        label="Lower bounds of all methods",
    )
    keys = key(
        ("area confidence", "confidence"),
        ("area credible", "credible"),
        ("area heuristic", "heuristic"),
        ("line claim", f"claim {number(claim.epsilon)}"),
    )
    return figure("All methods", _TEXT, picture, _table([verdict, *methods]), keys=keys, wide=True)


_TEXT = (
    "Lower bounds on epsilon from the same scores. A confidence bound exceeds the truth at most as often as "
    "it says, each for itself; a credible one depends on a prior, and of a heuristic one no error rate is "
    "known. The verdict rests on the first bar alone."
)


def _axis(canvas: Canvas) -> Html:
    bottom = canvas.y.start
    marks = []
    for tick in canvas.x.ticks(4):
        at = canvas.x(tick)
        marks.append(element("line", class_="grid", x1=at, x2=at, y1=4, y2=bottom))
        marks.append(element("text", canvas.x.label(tick, 4), class_="tick middle", x=at, y=bottom + 16))
    middle = (canvas.x.start + canvas.x.end) / 2
    marks.append(element("text", "epsilon", class_="axis middle", x=middle, y=canvas.height - 8))
    return joined(marks)


def _row(canvas: Canvas, row: BoundValues, place: int, is_verdict: bool) -> Html:
    top = 4 + place * _ROW
    width = canvas.x(row.whole or 0.0) - canvas.x.start
    weight = " strong" if is_verdict else ""
    return joined(
        [
            element("text", _name(row, is_verdict), class_=f"tick end{weight}", x=_NAMES - 8, y=top + 16),
            element("rect", class_=f"area {row.kind}", x=_NAMES, y=top + 6, width=max(width, 1), height=12),
            element(
                "text", number(row.whole), class_=f"tick end{weight}", x=WIDTH - 2, y=top + 16
            ),
        ]
    )  # fmt: skip


def _hit(row: BoundValues, place: int) -> Html:
    return element(
        "rect", class_="hit", x=0, y=4 + place * _ROW, width=WIDTH, height=_ROW, data_tip=_tip(row)
    )


def _name(row: BoundValues, is_verdict: bool) -> str:
    return "verdict" if is_verdict else f"{row.name}, {_rule(row)}"


def _rule(row: BoundValues) -> str:
    name = row.rule.split("(")[0]
    return f"at {number(row.threshold)}" if name == "Fixed" else _RULES.get(name, name[:12])


def _tip(row: BoundValues) -> str:
    # a kind is part of the statement
    whole = "" if row.whole is None else f"\nfor the claim: epsilon >= {number(row.whole)}"
    return f"{row.name}\n{row.statement}{whole}\n{row.method}"


def _table(rows: Sequence[BoundValues]) -> Html:
    header = ("method", "threshold", "kind", "epsilon", "for the claim")
    cells = [(row.name, _rule(row), str(row.kind), number(row.epsilon), number(row.whole)) for row in rows]
    return table(header, cells, words=3, label="Bounds of all methods, as a table")

"""How the scores with and without the canary lie."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dpaudit._markup import Html
from dpaudit.report.figures import Histogram
from dpaudit.report.plots._canvas import Canvas
from dpaudit.report.plots._figure import figure, key, table
from dpaudit.report.plots._scale import number
from dpaudit.stats._types import FloatArray

__all__ = ["scores_figure"]


def scores_figure(found: Histogram, *, wide: bool = False) -> Html:
    """Two outlines, one filled, and the threshold."""
    shares = found.share(found.with_canary), found.share(found.without_canary)
    highest = max(float(share.max()) for share in shares)
    canvas = Canvas.of((float(found.edges[0]), float(found.edges[-1])), (0.0, 100 * highest * 1.08))
    xs = np.repeat(found.edges, 2)[1:-1]
    present, absent = (np.repeat(100 * share, 2) for share in shares)
    marks = [
        canvas.axes("score", "share of the scores, %"),
        canvas.area(list(xs), [0.0] * xs.size, list(present), "area with"),
        canvas.line(xs, present, "line with"),
        canvas.line(xs, absent, "line without"),
    ]
    if found.threshold is not None and found.edges[0] <= found.threshold <= found.edges[-1]:
        marks.append(canvas.vertical(found.threshold, "line threshold"))
    middles = list((found.edges[1:] + found.edges[:-1]) / 2)
    picture = canvas.svg(*marks, canvas.strips(middles, _tips(found)), label="Scores in bins")
    return figure("Scores", _text(found), picture, _table(found), keys=_key(found), wide=wide)


def _key(found: Histogram) -> Html:
    entries = [("area with", "with the canary"), ("line without", "without it")]
    if found.threshold is not None:
        entries.append(("line threshold", f"threshold {number(found.threshold)}"))
    return key(*entries)


def _text(found: Histogram) -> str:
    sizes = [int(side.sum()) for side in (found.with_canary, found.without_canary)]
    return (
        f"{sizes[0]:,} scores with the canary and {sizes[1]:,} without it. The further they lie apart, the "
        "better an attacker tells the two; what overlaps cannot be told."
    )


def _bins(edges: FloatArray) -> list[str]:
    return [f"{number(low)} to {number(high)}" for low, high in pairwise(edges)]


def _tips(found: Histogram) -> list[str]:
    sides = found.with_canary, found.without_canary
    shares = [100 * found.share(side) for side in sides]
    return [
        f"score {between}\nwith the canary: {sides[0][i]:,} ({shares[0][i]:.2g} %)\n"
        f"without it: {sides[1][i]:,} ({shares[1][i]:.2g} %)"
        for i, between in enumerate(_bins(found.edges))
    ]


def _table(found: Histogram) -> Html:
    rows = [
        (between, f"{found.with_canary[i]:,}", f"{found.without_canary[i]:,}")
        for i, between in enumerate(_bins(found.edges))
    ]
    return table(("score", "with", "without"), rows, label="Scores in bins, as a table")

"""Plots drawn with matplotlib: the only module that imports it, and only when something is drawn."""

from __future__ import annotations

import math
from itertools import cycle
from textwrap import fill
from typing import Any, BinaryIO

from dpaudit import _validate
from dpaudit.errors import MissingExtraError

# distinct for color-blind readers as well (Okabe and Ito)
_PALETTE = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a6d3b", "#7f3fbf"
_METHOD_COLORS = {
    "f-DP(joint)": _PALETTE[0],
    "f-DP(CP)": _PALETTE[1],
    "f-DP(ZB)": _PALETTE[2],
    "(eps,delta)(CP)": _PALETTE[3],
    "(eps,delta)(ZB)": _PALETTE[4],
    "eps-DP(Katz)": _PALETTE[5],
    "ours": _PALETTE[6],
    "(eps,delta)(joint)": _PALETTE[7],
}
_PANEL = 4.4, 3.4  # inches
_CATEGORY = 1.3  # inches for the bars of one category
_DECADES = 100.0  # ratio from which a logarithmic axis contains at least two powers of ten
_ACCENT, _SOFT, _INK, _MUTED = "#1d5c9c", "#cfe0f2", "#1b1d21", "#59606a"
_ALARM, _ALARM_SOFT = "#b3261e", "#fdecea"  # a violation, as in reports


def draw_tradeoff(plane: Any, ax: Any = None) -> Any:
    """Draw the two error rates of a :class:`dpaudit.stats._result.ErrorRatePlane`."""
    ax = _axes(ax)
    (left, right), (low, high) = plane.region
    level = _validate.percent(plane.confidence)
    ax.fill_between(plane.fpr, plane.claimed, color="#f1f2f4", linewidth=0)
    ax.plot([0, 1], [1, 0], color=_MUTED, linewidth=1, linestyle=":")
    ax.plot(plane.fpr, plane.claimed, color=_INK, label="claimed curve")
    ax.plot(plane.fpr, plane.bound, color=_ACCENT, linestyle="--", label="curve of the bound")
    ax.fill(
        [left, right, right, left], [low, low, high, high], color=_SOFT, ec=_ACCENT, label=f"{level} region"
    )
    ax.plot(plane.counts.fpr, plane.counts.fnr, "o", color=_ACCENT, markersize=4, label="measured")
    ax.set(xlabel="false positive rate", ylabel="false negative rate", xlim=(0, 1), ylim=(0, 1))
    ax.legend(frameon=False)
    return ax


def draw_trajectory(trajectory: Any, claimed: float, ax: Any = None) -> Any:
    """Draw the bound of a :class:`dpaudit.recording.Trajectory` over time, with the claimed epsilon."""
    ax = _axes(ax)
    steps = [point.num_done for point in trajectory.points]
    lower = [point.epsilon for point in trajectory.points]
    top = 1.25 * max(claimed, *lower)
    color, band = (_ALARM, _ALARM_SOFT) if lower[-1] > claimed else (_ACCENT, _SOFT)
    # infinite values are drawn above the picture
    upper = [min(point.upper, 2 * top) for point in trajectory.points]
    ax.fill_between(steps, lower, upper, color=band, linewidth=0, label="band")
    ax.plot(steps, lower, color=color, label="lower bound")
    ax.axhline(claimed, color=_INK, linestyle="--", label="claim")
    ax.set(xlabel="training steps", ylabel="epsilon", ylim=(0, top))
    ax.legend(frameon=False)
    return ax


def draw_picture(picture: Any, files: dict[str, BinaryIO]) -> None:
    """Draw a :class:`dpaudit.experiments.reproduction.Picture`, panels of series, in each format."""
    require_plotting()
    from matplotlib import rc_context  # noqa: PLC0415  # most users never draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    columns = min(picture.columns, len(picture.panels))
    lines = math.ceil(len(picture.panels) / columns)
    labels = list(dict.fromkeys(series.label for panel in picture.panels for series in panel.series))
    colors = _colors(labels)
    wide = max(_PANEL[0], *(_CATEGORY * len(panel.categories) for panel in picture.panels))
    width = wide * columns + 0.2
    # a letter of the legend is about 1/16 inch wide; a mark with its gap adds 0.6 inch
    side_by_side = max(1, int(width / (max(map(len, labels), default=0) / 16 + 0.6)))
    height = _PANEL[1] * lines + 0.2 * math.ceil((len(labels) + 1) / side_by_side) + 0.3
    with rc_context({"svg.hashsalt": "dpaudit", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        for number, panel in enumerate(picture.panels, 1):
            _draw_panel(figure.add_subplot(lines, columns, number), panel, colors)
        _draw_legend(figure, side_by_side)
        for name, file in files.items():
            figure.savefig(file, format=name, dpi=150, metadata={"Date": None} if name == "svg" else None)


def _colors(labels: list[str]) -> dict[str, str]:
    """Return the color of each label: the same for a method in all pictures, different for its lines."""
    colors: dict[str, str] = {}
    for label in labels:
        preferred = next(
            (color for method, color in _METHOD_COLORS.items() if label.startswith(method)), None
        )
        if preferred is not None and preferred not in colors.values():
            colors[label] = preferred
    rest = cycle([color for color in _PALETTE if color not in colors.values()] or _PALETTE)
    return {label: colors.get(label) or next(rest) for label in labels}


def _draw_panel(ax: Any, panel: Any, colors: dict[str, str]) -> None:
    bars = [series for series in panel.series if series.mark == "bars"]
    width = 0.8 / max(len(bars), 1)
    for series in panel.series:
        offset = (bars.index(series) - (len(bars) - 1) / 2) * width if series in bars else 0.0
        _draw_series(ax, series, colors[series.label], (offset, width))
    if panel.level is not None:
        ax.axhline(panel.level, color=_INK, linewidth=1, linestyle=":", label=panel.level_label)
    if panel.categories:
        ax.set_xticks(range(len(panel.categories)), [fill(name, 14) for name in panel.categories])
    if panel.log_x:
        _log_axis(ax, sorted({x for series in panel.series for x in series.x}))
    ranges = {"xlim": panel.x_range, "ylim": panel.y_range}
    ax.set(xlabel=panel.x_label, ylabel=panel.y_label, **{k: v for k, v in ranges.items() if v is not None})
    ax.set_title(panel.title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def _log_axis(ax: Any, values: list[float]) -> None:
    """Mark powers of ten, or the values themselves if they are too close together."""
    ax.set_xscale("log")
    if values[-1] < _DECADES * values[0]:
        ax.set_xticks(values, [f"{x:,g}" for x in values])
        ax.minorticks_off()


def _draw_series(ax: Any, series: Any, color: str, bar: tuple[float, float]) -> None:
    x, y, label = list(series.x), list(series.y), series.label
    if series.mark == "bars":
        centers = [center + bar[0] for center in x]
        ax.bar(centers, y, bar[1], yerr=series.spread, color=color, label=label, error_kw={"linewidth": 1})
    elif series.mark == "points":
        ax.errorbar(x, y, yerr=series.spread, fmt="o", markersize=4, color=color, label=label, linewidth=1)
    elif series.mark == "steps":
        ax.stairs(y, x, color=color, label=label, fill=True, alpha=0.45)
    elif series.mark == "truth":
        ax.plot(x, y, ":", color=_INK, label=label, linewidth=1)
    else:
        style = "--" if series.mark == "dashes" else "-"
        ax.plot(x, y, style, color=color, label=label, linewidth=1.4)
        if series.spread is not None:
            low, high = ([a + sign * b for a, b in zip(y, series.spread, strict=True)] for sign in (-1, 1))
            ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _draw_legend(figure: Any, columns: int) -> None:
    """Draw one legend for all panels, below them."""
    entries: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(), entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def require_plotting() -> None:
    """Raise ``MissingExtraError`` with the install command if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingExtraError("Plotting", "matplotlib") from error


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    require_plotting()
    from matplotlib import pyplot  # noqa: PLC0415  # most users never draw

    return pyplot.subplots(figsize=(5.5, 4), layout="constrained")[1]

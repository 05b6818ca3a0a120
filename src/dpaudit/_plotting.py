"""Pictures by matplotlib: the only place that imports it, and only when something is drawn."""

from __future__ import annotations

from typing import Any

from dpaudit.errors import MissingExtraError

__all__ = ["draw_course", "draw_plane"]

_ACCENT, _SOFT, _INK, _MUTED = "#1d5c9c", "#cfe0f2", "#1b1d21", "#59606a"


def draw_plane(plane: Any, ax: Any = None) -> Any:
    """The two error rates: a :class:`dpaudit.stats._plane.Plane`."""
    ax = _axes(ax)
    (left, right), (low, high) = plane.region
    level = f"{100 * plane.confidence:g} %"
    ax.fill_between(plane.fpr, plane.claimed, color="#f1f2f4", linewidth=0)
    ax.plot([0, 1], [1, 0], color=_MUTED, linewidth=1, linestyle=":")
    ax.plot(plane.fpr, plane.claimed, color=_INK, label="claimed curve")
    ax.plot(plane.fpr, plane.bound, color=_ACCENT, linestyle="--", label="the bound's curve")
    ax.fill(
        [left, right, right, left], [low, low, high, high], color=_SOFT, ec=_ACCENT, label=f"{level} region"
    )
    ax.plot(plane.counts.fpr, plane.counts.fnr, "o", color=_ACCENT, markersize=4, label="measured")
    ax.set(xlabel="false positive rate", ylabel="false negative rate", xlim=(0, 1), ylim=(0, 1))
    ax.legend(frameon=False)
    return ax


def draw_course(course: Any, claimed: float, ax: Any = None) -> Any:
    """The bound over time: a :class:`dpaudit.recording.Course`, beside the claimed epsilon."""
    ax = _axes(ax)
    steps = [one.num_done for one in course.moments]
    lower = [one.epsilon for one in course.moments]
    top = 1.25 * max(claimed, *lower)
    # what is infinite is above every picture
    upper = [min(one.upper, 2 * top) for one in course.moments]
    ax.fill_between(steps, lower, upper, color=_SOFT, linewidth=0, label="band")
    ax.plot(steps, lower, color=_ACCENT, label=f"lower bound, {100 * course.confidence:g} %")
    ax.axhline(claimed, color=_INK, linestyle="--", label="claim")
    ax.set(xlabel="steps", ylabel="epsilon", ylim=(0, top))
    ax.legend(frameon=False)
    return ax


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot  # noqa: PLC0415  # most users never draw
    except ImportError as error:
        raise MissingExtraError("Plotting", "report") from error
    return pyplot.subplots(figsize=(5.5, 4), layout="constrained")[1]

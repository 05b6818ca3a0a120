"""Drawings by matplotlib: their lines, bars, ticks, colors and sizes."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
import pytest

import dpaudit
from dpaudit._plotting import _colors, _draw_panel, draw_picture, draw_tradeoff, draw_trajectory
from dpaudit.experiments.reproduction import Picture
from dpaudit.experiments.reproduction._figure import Mark, Panel, Series
from dpaudit.recording import Trajectory, TrajectoryPoint
from dpaudit.stats._roc_band import ErrorRatePlane

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def ax() -> Any:
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure().add_subplot()


def a_panel(*series: Series, **more: Any) -> Panel:
    return Panel(x_label="across", y_label="up", series=series, **more)


def drawn(ax: Any, panel: Panel) -> Any:
    _draw_panel(ax, panel, {one.label: f"C{number}" for number, one in enumerate(panel.series)})
    return ax


def test_a_trajectory_is_drawn_with_its_band_below_the_top_and_the_claim(ax: Any) -> None:
    points = tuple(
        TrajectoryPoint(num_done=done, epsilon=low, estimate=low, upper=high)
        for done, low, high in ((10, 1.0, math.inf), (20, 2.0, 5.0))
    )
    draw_trajectory(Trajectory(points=points, confidence=0.9), 4.0, ax)
    bound, claim = ax.get_lines()
    assert bound.get_xydata().tolist() == [[10, 1], [20, 2]]
    assert claim.get_ydata() == [4, 4]
    assert (bound.get_label(), claim.get_label()) == ("lower bound", "claim")
    assert claim.get_linestyle() == "--"
    [band] = ax.collections
    edges = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
    assert edges == {(10, 1), (10, 10), (20, 2), (20, 5)}
    assert ax.get_ylim() == (0, 5)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("training steps", "epsilon")
    draw_trajectory(Trajectory(points=points, confidence=0.9), 1.5, ax)
    assert ax.get_lines()[2].get_color() == "#b3261e" != bound.get_color()  # above the claim


def test_error_rates_are_drawn_with_their_region_and_both_curves(ax: Any) -> None:
    counts = dpaudit.ErrorCounts(false_positives=3, num_absent=10, false_negatives=4, num_present=10)
    plane = ErrorRatePlane.of(counts, tradeoff=dpaudit.Gaussian(), claimed=1.0, bound=0.2, confidence=0.9)
    draw_tradeoff(plane, ax)
    nothing, claimed, bound, measured = ax.get_lines()
    assert nothing.get_xydata().tolist() == [[0, 1], [1, 0]]
    for line, curve in ((claimed, plane.claimed), (bound, plane.bound)):
        assert np.array_equal(line.get_xydata(), np.stack([plane.fpr, curve], axis=1))
    assert measured.get_xydata().tolist() == [[0.3, 0.4]]
    (left, right), (low, high) = plane.region
    [region] = ax.patches
    assert {tuple(point) for point in region.get_xy().tolist()} == {
        (left, low), (right, low), (right, high), (left, high)
    }  # fmt: skip
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 1), (0, 1))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("false positive rate", "false negative rate")


def test_bars_of_a_category_stand_side_by_side_around_its_tick(ax: Any) -> None:
    one = Series(label="one", x=[0, 1], y=[2.0, 3.0], spread=[0.1, 0.2], mark=Mark.BARS)
    other = Series(label="other", x=[0, 1], y=[4.0, 5.0], mark=Mark.BARS)
    drawn(ax, a_panel(one, other, categories=["a category with a long name", "b"], level=4.5))
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_width(), bar.get_height()) for bar in ax.patches]
    assert bars == [
        pytest.approx(bar) for bar in ((-0.2, 0.4, 2), (0.8, 0.4, 3), (0.2, 0.4, 4), (1.2, 0.4, 5))
    ]
    [errors] = ax.collections
    assert [part[:, 1].tolist() for part in errors.get_segments()] == [
        pytest.approx([1.9, 2.1]),
        pytest.approx([2.8, 3.2]),
    ]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a category\nwith a long\nname", "b"]
    [level] = [line for line in ax.get_lines() if line.get_label() == "theoretical"]
    assert level.get_ydata() == [4.5, 4.5]


@pytest.mark.parametrize(
    ("mark", "style", "color"),
    [(Mark.LINE, "-", "C0"), (Mark.DASHES, "--", "C0"), (Mark.TRUTH, ":", "#1b1d21")],
)
def test_a_line_has_the_style_of_its_mark(ax: Any, mark: Mark, style: str, color: str) -> None:
    drawn(ax, a_panel(Series(label="line", x=[1, 2], y=[3.0, 4.0], mark=mark), title="above"))
    [line] = ax.get_lines()
    assert line.get_xydata().tolist() == [[1, 3], [2, 4]]
    assert (line.get_linestyle(), line.get_color(), line.get_label()) == (style, color, "line")
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("above", "across", "up")
    assert not ax.spines["top"].get_visible()


def test_the_spread_of_a_line_is_a_band_and_that_of_points_are_bars(ax: Any) -> None:
    line = Series(label="line", x=[1, 2], y=[3.0, 4.0], spread=[0.5, 1.0])
    points = Series(label="points", x=[1, 2], y=[6.0, 7.0], spread=[0.5, 1.0], mark=Mark.POINTS)
    drawn(ax, a_panel(line, points, x_range=(0, 3), y_range=(1, 9)))
    band, errors = ax.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} == {
        (1, 2.5), (1, 3.5), (2, 3), (2, 5)
    }  # fmt: skip
    assert [part[:, 1].tolist() for part in errors.get_segments()] == [[5.5, 6.5], [6, 8]]
    assert ax.get_lines()[1].get_marker() == "o"
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 3), (1, 9))


def test_steps_are_filled_from_edge_to_edge(ax: Any) -> None:
    drawn(ax, a_panel(Series(label="scores", x=[0, 1, 3], y=[0.25, 0.75], mark=Mark.STEPS)))
    [stairs] = ax.patches
    values, edges, _ = stairs.get_data()
    assert (list(values), list(edges), stairs.get_fill()) == ([0.25, 0.75], [0, 1, 3], True)


@pytest.mark.parametrize(("largest", "expected"), [(99, ["1", "99"]), (100, None)])
def test_a_short_logarithmic_axis_is_labeled_at_its_values(ax: Any, largest: int, expected: Any) -> None:
    drawn(ax, a_panel(Series(label="line", x=[1, largest], y=[0.0, 1.0]), log_x=True))
    assert ax.get_xscale() == "log"
    if expected is not None:
        assert [text.get_text() for text in ax.get_xticklabels()] == expected
    else:
        assert {1, 10, 100} <= set(ax.get_xticks())


@pytest.mark.parametrize(
    ("names", "columns", "inches"),
    [
        ((), 1, (4.4 + 0.2, 2 * 3.4 + 0.2 + 0.3)),
        ((), 4, (2 * 4.4 + 0.2, 3.4 + 0.2 + 0.3)),
        ("abcde", 1, (5 * 1.3 + 0.2, 2 * 3.4 + 0.2 + 0.3)),
    ],
)
def test_a_picture_has_room_for_its_panels_categories_and_legend(
    names: Any, columns: int, inches: tuple[float, float]
) -> None:
    x = range(len(names)) if names else [0, 1]
    one = Series(label="one", x=list(x), y=[1.0] * len(x), mark=Mark.BARS)
    picture = Picture(panels=[a_panel(one, categories=list(names))] * 2, columns=columns)
    draw_picture(picture, {"svg": (file := io.BytesIO())})
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', file.getvalue().decode())
    assert size is not None
    assert [float(part) / 72 for part in size.groups()] == pytest.approx(inches)
    assert file.getvalue().count(b"<!-- one -->") == 1  # a single legend for both panels


def test_a_method_keeps_its_color_and_every_line_has_its_own() -> None:
    labels = ["f-DP(joint), t = 1/2", "f-DP(joint), same data", "measured", "ours, one run"]
    found = _colors(labels)
    assert found["f-DP(joint), t = 1/2"] == "#0072b2"
    assert found["ours, one run"] == "#000000"
    assert len(set(found.values())) == 4
    assert list(found) == labels
    assert _colors(["x"]) == {"x": "#0072b2"}

"""The marks of every plot of a report, at the coordinates of the numbers that they show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import dpaudit
from dpaudit._html import Html
from dpaudit.recording import Trajectory, TrajectoryPoint
from dpaudit.report._plot_data import Histogram, PlotData
from dpaudit.report._plots import (
    comparison_plot,
    methods_plot,
    roc_plot,
    scores_plot,
    tradeoff_plot,
    trajectory_plot,
)
from dpaudit.report._run import ClaimSummary, MethodBound, Run
from dpaudit.report._svg import AxisScale, Canvas
from dpaudit.stats import RocBand
from dpaudit.stats._roc_band import ErrorRatePlane

Point = tuple[float, float]


class Drawn:
    """The elements of a figure; coordinates as numbers on its axes, which have these ranges."""

    def __init__(self, html: Html, x: Point, y: Point, height: float = 280) -> None:
        self.tree = ElementTree.fromstring(html.replace("\n", "&#10;"))
        self._x, self._y, self._height = x, y, height

    def marked(self, class_: str) -> list[dict[str, str]]:
        """Return the attributes of all marks of this class, except those of the legend."""
        [picture] = (one for one in self.tree.iter("svg") if one.get("class") == "plot")
        return [one.attrib for one in picture.iter() if one.get("class") == class_]

    def path(self, class_: str) -> list[Point]:
        [one] = self.marked(class_)
        pairs = [pair.split() for pair in one["d"].strip("MZ").split("L")]
        return [self.numbers(float(x), float(y)) for x, y in pairs]

    def numbers(self, x: float, y: float) -> Point:
        across, up = (x - 62) / (440 - 62 - 20), (self._height - 46 - y) / (self._height - 46 - 10)
        return (
            self._x[0] + across * (self._x[1] - self._x[0]),
            self._y[0] + up * (self._y[1] - self._y[0]),
        )

    def line(self, class_: str) -> list[list[Point]]:
        """Return both ends of straight lines."""
        return [
            [self.numbers(float(one[f"x{end}"]), float(one[f"y{end}"])) for end in "12"]
            for one in self.marked(class_)
        ]

    def texts(self, tag: str, class_: str | None = None) -> list[str]:
        found = (one for one in self.tree.iter(tag) if class_ is None or one.get("class") == class_)
        return ["".join(one.itertext()) for one in found]

    @property
    def tips(self) -> list[str]:
        return [one.attrib["data-tip"] for one in self.tree.iter() if "data-tip" in one.attrib]

    @property
    def table(self) -> list[list[str]]:
        return [["".join(cell.itertext()) for cell in row] for row in self.tree.iter("tr")]


def near(points: Iterable[Any]) -> Any:
    """Coordinates are rounded to a tenth of a pixel."""
    return pytest.approx(np.array(list(points), dtype=float), abs=0.05 * 100 / 358)


@cache
def a_result() -> dpaudit.Result:
    seen = dpaudit.Observations(with_canary=[1.0, 1.0, 0.0], without_canary=[0.0, 0.0, 1.0], normalized=True)
    return dpaudit.audit(seen, claim=dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5))


def a_run(claimed: float, *epsilons: float, name: str = "one") -> Run:
    points = tuple(
        TrajectoryPoint(num_done=10 * number, epsilon=epsilon, estimate=epsilon + 1, upper=epsilon + 2)
        for number, epsilon in enumerate(epsilons, 1)
    )
    return replace(
        Run.of(a_result(), name=name),
        counted="step",
        claim=ClaimSummary(summary="a claim", epsilon=claimed, delta=1e-5),
        figures=PlotData(course=Trajectory(points=points, confidence=0.9)),
    )


def test_the_histogram_is_drawn_at_the_percentages_of_each_side() -> None:
    scores = Histogram(
        edges=np.array([0.0, 1.0, 2.0]),
        with_canary=np.array([1, 3]),
        without_canary=np.array([2, 2]),
        threshold=1.5,
    )
    drawn = Drawn(scores_plot(scores), (0, 2), (0, 1.08 * 75))
    present = [(0, 25), (1, 25), (1, 75), (2, 75)]
    assert np.array(drawn.path("line with")) == near(present)
    assert np.array(drawn.path("area with")) == near([*present, (2, 0), (1, 0), (1, 0), (0, 0)])
    assert np.array(drawn.path("line without")) == near([(0, 50), (1, 50), (1, 50), (2, 50)])
    assert np.array(drawn.line("line threshold")) == near([[(1.5, 0), (1.5, 81)]])
    assert drawn.table == [
        ["score", "with", "without"],
        ["0 to 1", "1 (25 %)", "2 (50 %)"],
        ["1 to 2", "3 (75 %)", "2 (50 %)"],
    ]
    assert drawn.tips[1] == "score: 1 to 2\nwith: 3 (75 %)\nwithout: 2 (50 %)"
    assert drawn.texts("li") == ["with the canary", "without it", "threshold 1.5"]
    assert drawn.texts("p")[0].startswith("4 scores with the canary and 4 without it.")
    outside = Drawn(scores_plot(replace(scores, threshold=2.5)), (0, 2), (0, 81))
    assert outside.marked("line threshold") == []
    assert "threshold 2.5" in outside.texts("li")


def test_the_bound_over_time_is_drawn_with_its_band_its_estimate_and_the_claim() -> None:
    run = a_run(4.0, 1.0, 2.0, 3.5)
    assert run.figures.course is not None
    points = (*run.figures.course.points[:2], replace(run.figures.course.points[2], upper=math.inf))
    drawn = Drawn(trajectory_plot(run, Trajectory(points=points, confidence=0.9)), (10, 30), (0, 1.25 * 4.5))
    assert np.array(drawn.path("line bound underpowered")) == near([(10, 1), (20, 2), (30, 3.5)])
    assert np.array(drawn.path("line estimate underpowered")) == near([(10, 2), (20, 3), (30, 4.5)])
    beyond = 2 * 1.25 * 4.5  # infinity is drawn just outside
    assert np.array(drawn.path("area band underpowered")) == near(
        [(10, 3), (20, 4), (30, beyond), (30, 3.5), (20, 2), (10, 1)]
    )
    assert np.array(drawn.line("line claim")) == near([[(10, 4), (30, 4)]])
    assert drawn.texts("text", "tick middle") == ["10", "15", "20", "25", "30"]
    assert drawn.texts("text", "tick end") == ["0", "2", "4"]
    assert drawn.texts("text", "axis middle") == ["training steps", "epsilon"]
    assert drawn.tips[2] == "training steps: 30\nlower bound: 3.5\nestimate: 4.5\ntop of the band: infinite"
    edges = [(float(one["x"]), float(one["width"])) for one in drawn.marked("hit")]
    assert edges == [(62, 89.5), (151.5, 179), (330.5, 89.5)]
    assert drawn.table[0] == ["training steps", "lower bound", "estimate", "top of the band"]
    assert drawn.table[1:] == [["10", "1", "2", "3"], ["20", "2", "3", "4"], ["30", "3.5", "4.5", "infinite"]]
    assert drawn.texts("li") == ["lower bound", "band", "estimate", "claim 4"]


def test_the_text_of_the_bound_over_time_says_when_it_holds_and_the_bound_of_another_method() -> None:
    run = replace(a_run(4.0, 1.0, 2.0), counted="trial")
    course = run.figures.course
    assert course is not None
    text = Drawn(trajectory_plot(run, course), (10, 20), (0, 1)).texts("p")[0]
    assert "holds at every trial simultaneously" in text
    assert "%" not in text  # the one confidence level is that of the verdict
    assert text.endswith(f"with a bound of {run.bound.epsilon:.4g}.")
    own = replace(run, figures=replace(run.figures, of_verdict=True))
    assert "another method" not in Drawn(trajectory_plot(own, course), (10, 20), (0, 1)).texts("p")[0]


def test_bounds_of_several_runs_are_drawn_over_the_percentage_of_their_observations() -> None:
    runs = [a_run(4.0, 1.0, 2.0, 3.0, name="long"), a_run(6.0, 0.5, 1.5, name="short")]
    html = comparison_plot(runs)
    assert html is not None
    drawn = Drawn(html, (0, 100), (0, 1.25 * 6))
    assert np.array(drawn.path("line run one underpowered")) == near([(100 / 3, 1), (200 / 3, 2), (100, 3)])
    assert np.array(drawn.path("line run two underpowered")) == near([(50, 0.5), (100, 1.5)])
    assert np.array(drawn.line("line claim")) == near([[(0, 4), (100, 4)], [(0, 6), (100, 6)]])
    assert drawn.table == [
        ["observations", "long", "short"],
        ["33 %", "1", "0.5"],
        ["67 %", "2", "1.5"],
        ["100 %", "3", "1.5"],
    ]
    assert drawn.texts("li") == ["long", "short", "claim 4, 6"]
    assert comparison_plot(runs[:1]) is None


@pytest.fixture(scope="module")
def plane() -> ErrorRatePlane:
    counts = dpaudit.ErrorCounts(false_positives=300, num_absent=1000, false_negatives=400, num_present=1000)
    return ErrorRatePlane.of(counts, tradeoff=dpaudit.Gaussian(), claimed=1.0, bound=0.6, confidence=0.95)


def test_error_rates_are_drawn_with_both_curves_and_the_region(plane: ErrorRatePlane) -> None:
    drawn = Drawn(tradeoff_plot(plane), (0, 1), (0, 1), 300)
    assert np.array(drawn.path("line nothing")) == near([(0, 1), (1, 0)])
    assert np.array(drawn.path("line curve")) == near(zip(plane.fpr, plane.claimed, strict=True))
    assert np.array(drawn.path("line bound")) == near(zip(plane.fpr, plane.bound, strict=True))
    [dot], [box] = drawn.marked("dot measured"), drawn.marked("area region")
    assert drawn.numbers(float(dot["cx"]), float(dot["cy"])) == pytest.approx((0.3, 0.4), abs=1e-4)
    left, top, width, height = (float(box[name]) for name in ("x", "y", "width", "height"))
    (low, high), (less, more) = plane.region
    assert drawn.numbers(left, top) == pytest.approx((low, more), abs=1e-4)
    assert drawn.numbers(left + width, top + height) == pytest.approx((high, less), abs=1e-4)
    assert drawn.texts("text", "axis middle") == ["false positive rate", "false negative rate"]
    assert len(drawn.table) == 1 + 40
    assert drawn.table[1] == ["0", "1", "1"]
    assert drawn.table[-1] == ["1", "0", "0"]
    assert len(drawn.tips) == 40
    assert f"a false positive rate of 0.3 ({low:.4g} to {high:.4g})" in drawn.texts("p")[0]
    assert "95 % confidence" in drawn.texts("p")[0]


def test_bars_of_methods_are_as_long_as_their_bounds() -> None:
    run = a_run(4.0, 1.0)
    others = [MethodBound(name, run.bound, end) for name, end in (("a", 2.0), ("b", None), ("c", math.inf))]
    run = replace(run, methods=tuple(others))
    drawn = Drawn(methods_plot(run), (0, 1), (0, 1))
    [picture] = (one for one in drawn.tree.iter("svg") if one.get("class") == "plot")
    assert picture.get("viewBox") == f"0 0 440 {4 + 3 * 24 + 46}"
    bars = drawn.marked(f"area {run.bound.kind}")
    unit = (440 - 52 - 192) / (1.05 * 4.0)
    own = run.verdict_bound.claim_epsilon or 0.0
    lengths = [max(own * unit, 1), 2 * unit, 2 * (440 - 52 - 192)]
    assert [float(one["width"]) for one in bars] == pytest.approx(lengths, rel=1e-4)
    assert [(float(one["x"]), float(one["y"]), float(one["height"])) for one in bars] == [
        (192, 4 + 24 * index + 6, 12) for index in range(3)
    ]
    [claim] = drawn.marked("line claim")
    assert float(claim["x1"]) == float(claim["x2"]) == pytest.approx(192 + 4 * unit, rel=1e-4)
    assert (float(claim["y1"]), float(claim["y2"])) == (76, 4)
    assert [one["y"] for one in drawn.marked("hit")] == ["4", "28", "52"]
    assert drawn.texts("text", "tick end strong")[0] == "verdict"
    rule = run.bound.threshold_rule.label
    assert drawn.texts("text", "tick end") == [f"a, {rule:.14}", "2", f"c, {rule:.14}", "infinite"]
    assert drawn.texts("text", "tick middle") == ["0", "2", "4"]
    assert len(drawn.table) == 1 + 4
    assert drawn.tips[1].startswith("method: a\n")
    assert drawn.tips[1].endswith("comparable to the claim: 2")


def test_axes_are_labeled_at_their_grid_lines() -> None:
    canvas = Canvas.of((0, 10), (0, 0.5), 200)
    tree = ElementTree.fromstring(f"<svg>{canvas.axes('across', 'up')}</svg>")
    lines = [[float(one.attrib[name]) for name in ("x1", "x2", "y1", "y2")] for one in tree.iter("line")]
    columns = [62 + 358 * share for share in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    rows = [154 - 144 * share for share in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    assert lines == pytest.approx(
        np.array([[at, at, 10, 154] for at in columns] + [[62, 420, at, at] for at in rows]), abs=1e-3
    )
    texts = [(one.text, float(one.attrib["x"]), float(one.attrib["y"])) for one in tree.iter("text")]
    assert texts == [
        *((f"{2 * i}", pytest.approx(at, abs=1e-3), 170) for i, at in enumerate(columns)),
        ("across", 241, 192),
        *((f"{i / 10}", 55, pytest.approx(at + 4, abs=1e-3)) for i, at in enumerate(rows)),
        ("up", 12, 82),
    ]
    assert next(one for one in tree.iter("text") if one.text == "up").get("transform") == "rotate(-90 12 82)"


def test_the_rates_of_the_attack_are_drawn_on_logarithmic_axes_with_their_band() -> None:
    roc = RocBand(
        confidence=0.95,
        fpr=np.array([0.001, 0.01, 0.1, 1.0]),
        claimed=np.array([0.01, 0.05, 0.3, 1.0]),
        reached=np.array([0.02, 0.06, 0.4, 1.0]),
        low=np.array([0.011, 0.04, 0.3, 0.9]),
        high=np.array([0.05, 0.1, 0.5, 1.0]),
    )
    drawn = Drawn(roc_plot(roc), (-3.0, 0.0), (-2.0, 0.0), 300)
    for mark, rates in (("line curve", roc.claimed), ("line bound", roc.reached)):
        assert drawn.path(mark) == near(np.log10(np.stack([roc.fpr, rates], axis=1)))
    # between two rates of the grid, the band has the wider end of both
    area = [(0.001, 0.1), (0.01, 0.1), (0.01, 0.5), (0.1, 0.5), (0.1, 1.0), (1.0, 1.0)]
    area += [(1.0, 0.3), (0.1, 0.3), (0.1, 0.04), (0.01, 0.04), (0.01, 0.011), (0.001, 0.011)]
    assert drawn.path("area band") == near(np.log10(area))
    assert drawn.table[1] == ["0.001", "0.01", "0.02", "0.011", "0.05"]
    assert drawn.tips[1].endswith("this attack: 0.06\nfrom: 0.04\nto: 0.1")
    assert {"0.001", "0.01", "0.1", "1"} <= set(drawn.texts("text"))
    assert "The verdict does not rest on this estimate." in drawn.texts("p")[0]


def test_a_logarithmic_axis_has_ticks_at_powers_of_ten() -> None:
    axis = AxisScale(2e-4, 1.0, 0.0, 100.0, log=True)
    assert axis.ticks() == [0.001, 0.01, 0.1, 1.0]
    assert [axis.label(tick) for tick in axis.ticks()] == ["0.001", "0.01", "0.1", "1"]
    assert axis(2e-4) == 0.0
    assert axis(1.0) == 100.0
    assert axis(0.0) == -100.0  # just outside

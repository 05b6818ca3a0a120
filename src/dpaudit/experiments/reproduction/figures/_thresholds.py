"""How the bound depends on the threshold, with few observations."""

from __future__ import annotations

import numpy as np
from scipy import special

from dpaudit.experiments.reproduction._bounds import DELTA, count_row
from dpaudit.experiments.reproduction._curves import bounds_panel
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._mechanism import counted
from dpaudit.experiments.reproduction._picture import Mark, Panel, Picture, Series, Table
from dpaudit.experiments.reproduction._scale import simulated
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, mean, only, values_of
from dpaudit.experiments.reproduction._work import Work
from dpaudit.stats import Gaussian, Optimal

__all__ = ["THRESHOLDS"]

_METHODS = "f-DP(CP)", "f-DP(joint)", "(eps,delta)(CP)", "(eps,delta)(joint)"


def _cells(settings: Settings) -> list[Key]:
    return [{"run": run} for run in range(settings["num_runs"])]


def _grid(settings: Settings) -> np.ndarray:
    optimal = Optimal(settings["noise"]).threshold(DELTA)
    return np.append(np.linspace(-3.5, 4.5, settings["num_thresholds"]), optimal)


def _measure(_: Key, work: Work) -> list[Row]:
    grid, settings = _grid(work.settings), work.settings
    [found] = counted([settings["num_observations"]], grid, settings["noise"], work.generator())
    return [
        {"threshold": float(threshold), **count_row(method, "fixed", found.at(place))}
        for place, threshold in enumerate(grid)
        for method in _METHODS
    ]


def _picture(rows: Rows, settings: Settings) -> Picture:
    noise = settings["noise"]
    edges = np.linspace(-3.5, 4.5, 41)
    scores = [
        Series(
            label=f"scores {text} the canary",
            x=list(edges),
            y=list(np.diff(special.ndtr((edges - middle) / noise))),
            mark=Mark.STEPS,
        )
        for text, middle in (("without", 0.0), ("with", 1.0))
    ]
    truth = Gaussian().epsilon(1 / noise, DELTA)
    bounds = bounds_panel(rows, "threshold", "threshold", truth, title="bound at each threshold")
    shares = Panel(
        title="where scores lie (expected)",
        x_label="score",
        y_label="share",
        series=scores,
        x_range=(-3.5, 5.0),
    )
    return Picture(panels=[bounds, shares], columns=2)


def _tables(rows: Rows, settings: Settings) -> list[Table]:
    optimal = max(values_of(rows, "threshold"))
    places = sorted(values_of(rows, "threshold"))
    near = [min(places, key=lambda place, at=at: abs(place - at)) for at in (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)]  # type: ignore[misc]
    lines = [
        (method, *(f"{mean(only(rows, method=method, threshold=at)):.2f}" for at in (*near, optimal)))
        for method in _METHODS
    ]
    truth = Gaussian().epsilon(1 / settings["noise"], DELTA)
    at_w = max(float(row["epsilon"] or 0) for row in only(rows, method="(eps,delta)(CP)", threshold=optimal))
    return [
        Table(
            title=f"Mean epsilon of {settings['num_runs']} runs, truth {truth:.2f}",
            header=("method", *(f"t = {at:.2f}" for at in near), f"w = {optimal:.2f}"),
            rows=lines,
        ),
        Table(
            title="What the paper says",
            header=("", "paper", "here"),
            rows=[("(eps,delta)(CP) at the optimal threshold", "0", f"{at_w:.2f} at most")],
        ),
    ]


_USUAL = {"noise": 1.0, "num_observations": 5_000, "num_thresholds": 81, "num_runs": 20}

THRESHOLDS = Figure(
    name="thresholds",
    title="Sensitivity to the threshold with 5,000 observations, noise 1",
    paper="Figure of section 5.2: the bound by the Gaussian curve is about the same at every threshold "
    "inside the scores, that by (epsilon, delta)-DP varies much, and is 0 at the threshold w that is best "
    "in the limit.",
    settings=simulated(_USUAL, num_thresholds=9, num_runs=2),
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    remarks=(
        "Every point is a confidence bound by itself, for a threshold that was chosen before the data; the "
        "largest of a curve is not.",
    ),
)

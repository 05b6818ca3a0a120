"""How the bound depends on the threshold, with few observations.

How many observations the best threshold of (eps, delta)-DP needs.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from dpaudit.experiments.reproduction._figure import (
    Figure,
    Key,
    Mark,
    Panel,
    Picture,
    Row,
    Rows,
    Series,
    Settings,
    Table,
    Work,
    mean,
    only,
    pairs_of,
    simulated,
    values_of,
)
from dpaudit.experiments.reproduction._simulation import DELTA, count_row, counted, log_spaced, nearest
from dpaudit.experiments.reproduction._study import bounds_panel
from dpaudit.stats import Gaussian, Optimal

_METHODS = "f-DP(CP)", "f-DP(joint)", "(eps,delta)(CP)", "(eps,delta)(joint)"


def _cells_thresholds(settings: Settings) -> list[Key]:
    return [{"run": run} for run in range(settings["num_runs"])]


def _grid(settings: Settings) -> np.ndarray:
    optimal = Optimal(settings["noise"]).threshold(DELTA)
    return np.append(np.linspace(-3.5, 4.5, settings["num_thresholds"]), optimal)


def _measure_thresholds(_: Key, work: Work) -> list[Row]:
    grid, settings = _grid(work.settings), work.settings
    [found] = counted([settings["num_observations"]], grid, settings["noise"], work.generator())
    return [
        {"threshold": float(threshold), **count_row(method, "fixed", found.at(place))}
        for place, threshold in enumerate(grid)
        for method in _METHODS
    ]


def _picture_thresholds(rows: Rows, settings: Settings) -> Picture:
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


def _tables_thresholds(rows: Rows, settings: Settings) -> list[Table]:
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


_USUAL_THRESHOLDS = {"noise": 1.0, "num_observations": 5_000, "num_thresholds": 81, "num_runs": 20}

THRESHOLDS = Figure(
    name="thresholds",
    title="Sensitivity to the threshold with 5,000 observations, noise 1",
    paper="Figure of section 5.2: the bound by the Gaussian curve is about the same at every threshold "
    "inside the scores, that by (epsilon, delta)-DP varies much, and is 0 at the threshold w that is best "
    "in the limit.",
    settings=simulated(_USUAL_THRESHOLDS, num_thresholds=9, num_runs=2),
    cells=_cells_thresholds,
    measure=_measure_thresholds,
    picture=_picture_thresholds,
    tables=_tables_thresholds,
    remarks=(
        "Every point is a confidence bound by itself, for a threshold that was chosen before the data; the "
        "largest of a curve is not.",
    ),
)


_ANY, _CURVE = "(eps,delta)(CP)", "f-DP(CP)"


def _cells_threshold_observations(settings: Settings) -> list[Key]:
    return [{"run": run} for run in range(settings["num_runs"])]


def _measure_threshold_observations(_: Key, work: Work) -> list[Row]:
    settings = work.settings
    optimal = Optimal(settings["noise"]).threshold(DELTA)
    thresholds = np.append(np.asarray(settings["thresholds"]), optimal)
    numbers = log_spaced(100, settings["most"], settings["num_sizes"])
    rows = []
    for found in counted(numbers, thresholds, settings["noise"], work.generator()):
        rules = [*(f"threshold {one:g}" for one in thresholds[:-1]), f"optimal w = {optimal:.2f}"]
        own = [count_row(_ANY, rule, found.at(place)) for place, rule in enumerate(rules)]
        first = found.at(settings["thresholds"].index(0.5))
        own += [count_row(method, "threshold 0.5", first) for method in (_CURVE, "f-DP(joint)")]
        rows += [{"observations": found.number, **row} for row in own]
    return rows


def _picture_threshold_observations(rows: Rows, settings: Settings) -> Picture:
    truth = Gaussian().epsilon(1 / settings["noise"], DELTA)
    return Picture(panels=[bounds_panel(rows, "observations", "observations a side", truth, log_x=True)])


def _tables_threshold_observations(rows: Rows, settings: Settings) -> list[Table]:
    powers = (10**3, 10**4, 5 * 10**4, 10**6, 10**7, 10**8, 25 * 10**7)
    shown = nearest(values_of(rows, "observations"), powers)
    pairs = pairs_of(rows)
    lines = [
        (
            f"{method}, {rule}",
            *(f"{mean(only(rows, method=method, rule=rule, observations=n)):.2f}" for n in shown),
        )
        for method, rule in pairs
    ]
    truth = Gaussian().epsilon(1 / settings["noise"], DELTA)
    return [
        Table(
            title=f"Mean epsilon of {settings['num_runs']} runs, truth {truth:.2f}",
            header=("method", *(f"{size:,}" for size in shown)),
            rows=lines,
        ),
        Table(
            title="What the paper says",
            header=("", "paper", "here"),
            rows=[_as_good(rows, pairs)],
        ),
    ]


def _as_good(rows: Rows, pairs: list[tuple[str, str]]) -> tuple[str, str, str]:
    """With how few observations the Gaussian curve is as good as the other with all of them."""
    sizes = values_of(rows, "observations")
    rule = next(rule for method, rule in pairs if rule.startswith("optimal"))
    largest = mean(only(rows, method=_ANY, rule=rule, observations=sizes[-1])) or 0.0
    enough = [
        size
        for size in sizes
        if (mean(only(rows, method=_CURVE, rule="threshold 0.5", observations=size)) or 0.0) >= largest
    ]
    text = f"f-DP(CP) with as good a bound as w with {sizes[-1]:,} observations"
    least = f"{enough[0]:,} ({sizes[-1] / enough[0]:,.0f} times fewer)" if enough else "not reached"
    return text, "5,000 times fewer", least


_USUAL_THRESHOLD_OBSERVATIONS = {
    "noise": 1.0,
    "thresholds": (0.5, 1.0, 2.0, 3.0, 4.0),
    "most": 250_000_000,
    "num_sizes": 41,
    "num_runs": 20,
}

THRESHOLD_OBSERVATIONS = Figure(
    name="threshold-observations",
    title="(epsilon, delta) with several thresholds, up to 250 million observations, noise 1",
    paper="Figure of appendix C.1: only the optimal threshold w comes close to the truth, with more than "
    "100 million observations; others stay below it. The Gaussian curve needs about 5,000 times fewer.",
    settings=simulated(_USUAL_THRESHOLD_OBSERVATIONS, most=100_000, num_sizes=4, num_runs=2),
    cells=_cells_threshold_observations,
    measure=_measure_threshold_observations,
    picture=_picture_threshold_observations,
    tables=_tables_threshold_observations,
    remarks=(
        "All thresholds are chosen before the data: every number is a confidence bound. The counts of "
        "errors are drawn instead of the scores.",
    ),
)

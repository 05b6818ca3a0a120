"""How many observations the best threshold of (eps, delta)-DP needs."""

from __future__ import annotations

import numpy as np

from dpaudit.experiments.reproduction._bounds import DELTA, count_row
from dpaudit.experiments.reproduction._curves import bounds_panel
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._mechanism import counted, log_spaced, nearest
from dpaudit.experiments.reproduction._picture import Picture, Table
from dpaudit.experiments.reproduction._scale import simulated
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, mean, only, pairs_of, values_of
from dpaudit.experiments.reproduction._work import Work
from dpaudit.stats import Gaussian, Optimal

__all__ = ["THRESHOLD_OBSERVATIONS"]

_ANY, _CURVE = "(eps,delta)(CP)", "f-DP(CP)"


def _cells(settings: Settings) -> list[Key]:
    return [{"run": run} for run in range(settings["num_runs"])]


def _measure(_: Key, work: Work) -> list[Row]:
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


def _picture(rows: Rows, settings: Settings) -> Picture:
    truth = Gaussian().epsilon(1 / settings["noise"], DELTA)
    return Picture(panels=[bounds_panel(rows, "observations", "observations a side", truth, log_x=True)])


def _tables(rows: Rows, settings: Settings) -> list[Table]:
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


_USUAL = {
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
    settings=simulated(_USUAL, most=100_000, num_sizes=4, num_runs=2),
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    remarks=(
        "All thresholds are chosen before the data: every number is a confidence bound. The counts of "
        "errors are drawn instead of the scores.",
    ),
)

"""Dependence of the bound on the threshold, and the number of observations for the best threshold."""

from __future__ import annotations

import numpy as np
from scipy import special

from dpaudit._types import FloatArray
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
    crossed,
    simulated,
)
from dpaudit.experiments.reproduction._panels import (
    bounds_panel,
    by_method,
    comparison_table,
    mean,
    mean_cells,
    only,
    pairs_of,
    values_of,
)
from dpaudit.experiments.reproduction._simulation import (
    DELTA,
    count_row,
    log_spaced,
    nearest,
    simulate_counts,
)
from dpaudit.stats import Gaussian, Optimal

_CURVE, _APPROXIMATE = "f-DP(CP)", "(eps,delta)(CP)"
_METHODS = _CURVE, "f-DP(joint)", _APPROXIMATE, "(eps,delta)(joint)"
_SHOWN_THRESHOLDS = -1.0, 0.0, 0.5, 1.0, 2.0, 3.0


def _with_optimal(thresholds: FloatArray, noise: float) -> FloatArray:
    return np.append(thresholds, Optimal(noise).threshold(DELTA))


def _truth(settings: Settings) -> float:
    return Gaussian().epsilon(1 / settings["noise"], DELTA)


def _title(settings: Settings) -> str:
    return f"Mean epsilon of {settings['num_runs']} runs, truth {_truth(settings):.2f}"


class BoundByThreshold(Figure):
    """The bounds of four methods at every threshold of a grid."""

    def cells(self, settings: Settings) -> list[Key]:
        return crossed(run=range(settings["num_runs"]))

    def measure(self, _: Key, work: Work) -> list[Row]:
        settings = work.settings
        grid = _with_optimal(np.linspace(-3.5, 4.5, settings["num_thresholds"]), settings["noise"])
        [found] = simulate_counts([settings["num_observations"]], grid, settings["noise"], work.generator())
        return [
            {"threshold": float(threshold), **count_row(method, "fixed", found.at(index))}
            for index, threshold in enumerate(grid)
            for method in _METHODS
        ]

    def picture(self, rows: Rows, settings: Settings) -> Picture:
        edges = np.linspace(-3.5, 4.5, 41)
        scores = [
            Series(
                label=f"scores {text} the canary",
                x=list(edges),
                y=list(np.diff(special.ndtr((edges - middle) / settings["noise"]))),
                mark=Mark.STEPS,
            )
            for text, middle in (("without", 0.0), ("with", 1.0))
        ]
        truth = _truth(settings)
        bounds = bounds_panel(rows, "threshold", "threshold", truth, title="bound at each threshold")
        shares = Panel(
            title="expected distribution of scores",
            x_label="score",
            y_label="share",
            series=scores,
            x_range=(-3.5, 5.0),
        )
        return Picture(panels=[bounds, shares], columns=2)

    def tables(self, rows: Rows, settings: Settings) -> list[Table]:
        thresholds = np.array(sorted(values_of(rows, "threshold")))
        optimal = float(thresholds[-1])
        near = [float(thresholds[np.abs(thresholds - at).argmin()]) for at in _SHOWN_THRESHOLDS]
        lines = [
            (method, *mean_cells(only(rows, method=method), "threshold", (*near, optimal)))
            for method in _METHODS
        ]
        at_w = max(float(row["epsilon"] or 0) for row in only(rows, method=_APPROXIMATE, threshold=optimal))
        return [
            Table(
                title=_title(settings),
                header=("method", *(f"t = {at:.2f}" for at in near), f"w = {optimal:.2f}"),
                rows=lines,
            ),
            comparison_table([("(eps,delta)(CP) at the optimal threshold", "0", f"at most {at_w:.2f}")]),
        ]


THRESHOLDS = BoundByThreshold(
    name="thresholds",
    title="Sensitivity to the threshold with 5,000 observations, noise 1",
    paper="Figure in section 5.2: the bound with the Gaussian curve is about the same at every threshold "
    "within the range of scores; that with (epsilon, delta)-DP varies widely, and is 0 at the "
    "asymptotically optimal threshold w.",
    settings=simulated(
        {"noise": 1.0, "num_observations": 5_000, "num_thresholds": 81, "num_runs": 20},
        num_thresholds=9,
        num_runs=2,
    ),
    remarks=(
        "Every single point is a confidence bound, for a threshold fixed before the data; the largest point "
        "of a curve is not.",
    ),
)


class ThresholdsByObservations(Figure):
    """The bound at a few thresholds and at the optimal one, by number of observations."""

    def cells(self, settings: Settings) -> list[Key]:
        return crossed(run=range(settings["num_runs"]))

    def measure(self, _: Key, work: Work) -> list[Row]:
        settings = work.settings
        thresholds = _with_optimal(np.asarray(settings["thresholds"]), settings["noise"])
        rules = [*(f"threshold {one:g}" for one in thresholds[:-1]), f"optimal w = {thresholds[-1]:.2f}"]
        half = settings["thresholds"].index(0.5)
        sizes = log_spaced(100, settings["most"], settings["num_sizes"])
        rows = []
        for found in simulate_counts(sizes, thresholds, settings["noise"], work.generator()):
            own = [count_row(_APPROXIMATE, rule, found.at(index)) for index, rule in enumerate(rules)]
            own += [count_row(method, rules[half], found.at(half)) for method in (_CURVE, "f-DP(joint)")]
            rows += [{"observations": found.number, **row} for row in own]
        return rows

    def picture(self, rows: Rows, settings: Settings) -> Picture:
        truth = _truth(settings)
        return Picture(
            panels=[bounds_panel(rows, "observations", "observations per side", truth, log_x=True)]
        )

    def tables(self, rows: Rows, settings: Settings) -> list[Table]:
        powers = (10**3, 10**4, 5 * 10**4, 10**6, 10**7, 10**8, 25 * 10**7)
        shown = nearest(values_of(rows, "observations"), powers)
        lines = [(label, *mean_cells(own, "observations", shown)) for label, own in by_method(rows)]
        header = ("method", *(f"{size:,}" for size in shown))
        return [
            Table(title=_title(settings), header=header, rows=lines),
            comparison_table([self._as_good(rows)]),
        ]

    def _as_good(self, rows: Rows) -> tuple[str, str, str]:
        """Return how few observations the Gaussian curve needs to match the other bound with all of them."""
        sizes = values_of(rows, "observations")
        rule = next(rule for _, rule in pairs_of(rows) if rule.startswith("optimal"))
        largest = mean(only(rows, method=_APPROXIMATE, rule=rule, observations=sizes[-1])) or 0.0
        enough = [
            size
            for size in sizes
            if (mean(only(rows, method=_CURVE, rule="threshold 0.5", observations=size)) or 0.0) >= largest
        ]
        text = f"f-DP(CP) with the same bound as w with {sizes[-1]:,} observations"
        least = f"{enough[0]:,} ({sizes[-1] / enough[0]:,.0f} times fewer)" if enough else "not reached"
        return text, "5,000 times fewer", least


THRESHOLD_OBSERVATIONS = ThresholdsByObservations(
    name="threshold-observations",
    title="(epsilon, delta) with several thresholds, up to 250 million observations, noise 1",
    paper="Figure in appendix C.1: only the optimal threshold w comes close to the truth, with more than "
    "100 million observations; others stay below it. The Gaussian curve needs about 5,000 times fewer.",
    settings=simulated(
        {
            "noise": 1.0,
            "thresholds": (0.5, 1.0, 2.0, 3.0, 4.0),
            "most": 250_000_000,
            "num_sizes": 41,
            "num_runs": 20,
        },
        most=100_000,
        num_sizes=4,
        num_runs=2,
    ),
    remarks=(
        "All thresholds are fixed before the data: every number is a confidence bound. Error counts are "
        "sampled instead of scores.",
    ),
)

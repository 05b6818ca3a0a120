"""Simulated scores of the Gaussian mechanism: bounds by number of observations and by threshold.

For the Poisson-subsampled Gaussian step, the curves of several accountants are compared with an attack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from dpaudit._types import FloatArray
from dpaudit.accounting import SubsampledGaussian, epsilon_above
from dpaudit.experiments.reproduction import _figure as fig
from dpaudit.experiments.reproduction._simulation import (
    CONFIDENCE,
    DELTA,
    CountsByThreshold,
    best_row,
    count_row,
    log_spaced,
    nearest,
    simulate_counts,
    step_noise,
)
from dpaudit.experiments.reproduction._trainings import OURS
from dpaudit.stats import Betting, Gaussian, Kind, Optimal
from dpaudit.stats.inference import BoundQuery

_HALF, _W = "threshold 1/2", "optimal threshold w"
_PLD, _GDP = "PLD", "GDP with the same epsilon"
_ADDED, _MEASURED = "this attack, without end", "measured"  # seeds and files of cells depend on these
_LABELS = {_ADDED: "this attack, exact"}


class BoundByObservations(fig.Figure):
    """Bounds of several methods on one growing sample."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        return fig.crossed(claimed=settings["epsilons"], run=range(settings["num_runs"]))

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        noise = step_noise(float(key["claimed"]))
        # the two thresholds that are fixed before the data, then a grid for the paper's practice
        grid = np.linspace(0.5 - 6 * noise, 0.5 + 6 * noise, work.settings["num_thresholds"])
        chosen = [0.5, Optimal(noise).threshold(DELTA)]
        thresholds = np.unique(np.concatenate([chosen, grid]))
        indices = [int(np.searchsorted(thresholds, threshold)) for threshold in chosen]
        numbers = log_spaced(100, work.settings["most"], work.settings["num_sizes"])
        rows = []
        for counts in simulate_counts(numbers, thresholds, noise, work.generator()):
            rows += [{"observations": counts.number, **row} for row in _bounds(counts, *indices)]
        num_steps = [number for number in numbers if number <= work.settings["most_steps"]]
        rng = np.random.default_rng([work.seed, 1])  # separate from the random stream of the counts
        return rows + _betting_rows(num_steps, noise, work.settings["num_canaries"], rng)

    def picture(self, rows: fig.FigureRows, settings: fig.Settings) -> fig.Picture:
        return fig.Picture(panels=[_panel(rows, epsilon) for epsilon in settings["epsilons"]], columns=2)

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        shown = nearest(rows.values("observations"), [10**power for power in range(2, 10)])
        lines = [
            (f"{epsilon:g}", label, *method_rows.mean_cells("observations", shown))
            for epsilon in settings["epsilons"]
            for label, method_rows in rows.only(claimed=epsilon).by_method()
        ]
        over = [(label, f"{_share_above(method_rows):.1%}") for label, method_rows in rows.by_method()]
        return [
            fig.Table(
                title=f"Mean epsilon of {settings['num_runs']} runs",
                header=("epsilon", "method", *(f"{size:,}" for size in shown)),
                rows=lines,
            ),
            fig.Table(
                title="Bounds above the truth (at most 5 % on average for confidence bounds)",
                header=("method", "above the truth"),
                rows=over,
            ),
        ]


def _bounds(counts: CountsByThreshold, half: int, optimal: int) -> list[fig.Row]:
    sides = counts.false_positives, counts.false_negatives, counts.number
    return [
        count_row("f-DP(CP)", _HALF, counts.at(half)),
        count_row("f-DP(joint)", _HALF, counts.at(half)),
        count_row("(eps,delta)(CP)", _W, counts.at(optimal)),
        best_row("f-DP(CP)", *sides),
        best_row("(eps,delta)(CP)", *sides),
    ]


def _betting_rows(
    numbers: Sequence[int], noise: float, num_canaries: int, rng: np.random.Generator
) -> list[fig.Row]:
    """Return the betting bounds after these numbers of steps of one run with many canaries per step."""
    curve = Gaussian()
    wrong = rng.binomial(num_canaries, curve.balanced_error(1 / noise), max(numbers))
    query = BoundQuery(curve, DELTA, 1 - CONFIDENCE)
    rows: list[fig.Row] = []
    for number in numbers:
        betting = Betting(horizon=number, expected=1 / noise)
        bets = betting.start(num_canaries, query, by_coin=True, with_tails=False)
        bets.extend(1 - 2 * wrong[:number] / num_canaries)
        rows.append(
            {
                "observations": number,
                "method": OURS,
                "rule": f"{num_canaries} canaries per step",
                "kind": str(Kind.CONFIDENCE),
                "epsilon": curve.epsilon(bets.parameter(), DELTA),
            }
        )
    return rows


def _panel(rows: fig.FigureRows, epsilon: float) -> fig.Panel:
    return fig.bounds_panel(
        rows.only(claimed=epsilon),
        "observations",
        "observations per side (our one run: steps)",
        epsilon,
        title=f"epsilon = {epsilon:g}",
        log_x=True,
        y_range=(0, 1.15 * epsilon),
    )


def _share_above(rows: fig.FigureRows) -> float:
    return sum(float(row["epsilon"] or 0) > float(row["claimed"] or 0) for row in rows) / len(rows)


class SubsampledStep(fig.Figure):
    """Trade-off curves of one Poisson-subsampled Gaussian step."""

    def cells(self, _: fig.Settings) -> list[fig.Key]:
        return fig.crossed(curve=(_PLD, _GDP, _ADDED, _MEASURED))

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        if key["curve"] == _MEASURED:
            return fig.rates_rows(*_empirical_rates(work))
        rate, noise = work.settings["canary_rate"], math.sqrt(work.settings["variance"])
        step = SubsampledGaussian(rate, 1)
        fpr = np.linspace(0, 1, work.settings["num_points"])
        if key["curve"] == _PLD:
            return fig.rates_rows(fpr, step.fnr(1 / noise, fpr))
        if key["curve"] == _GDP:
            epsilon = epsilon_above(noise, rate, 1, DELTA)
            mu = Gaussian().with_epsilon(epsilon, DELTA)
            return [
                {**row, "epsilon": epsilon, "mu": mu} for row in fig.rates_rows(fpr, Gaussian().fnr(mu, fpr))
            ]
        threshold = -special.ndtri(fpr)  # in units of the noise
        fnr = (1 - rate) * special.ndtr(threshold) + rate * special.ndtr(threshold - 1 / noise)
        return fig.rates_rows(fpr, fnr)

    def picture(self, rows: fig.FigureRows, _: fig.Settings) -> fig.Picture:
        marks = {_ADDED: fig.Mark.DASHES, _MEASURED: fig.Mark.POINTS}
        series = [
            rows.only(curve=name).rates_series(
                _LABELS.get(name, name), marks.get(name), every=8 if name == _MEASURED else 1
            )
            for name in rows.values("curve")
        ]
        return fig.Picture(panels=[fig.rates_panel(series)])

    def tables(self, rows: fig.FigureRows, _: fig.Settings) -> list[fig.Table]:
        lines, shown = [], (0.01, 0.1, 0.25, 0.5, 0.75)
        for name in rows.values("curve"):
            x, y = fig.FigureRows(sorted(rows.only(curve=name), key=lambda row: float(row["fpr"] or 0))).rates
            lines.append((_LABELS.get(name, name), *(f"{np.interp(fpr, x, y):.3f}" for fpr in shown)))
        epsilon, mu = (rows.values(name)[0] for name in ("epsilon", "mu"))
        return [
            fig.Table(
                title=f"False negative rate at false positive rates; epsilon = {epsilon:.2f}, mu = {mu:.2f}",
                header=("curve", *(f"fpr = {fpr:g}" for fpr in shown)),
                rows=lines,
            )
        ]


def _empirical_rates(work: fig.Work) -> tuple[FloatArray, FloatArray]:
    """Sample scores and return both error rates at every threshold."""
    settings, rng = work.settings, work.generator()
    number, noise = settings["num_observations"], math.sqrt(settings["variance"])
    absent = np.sort(noise * rng.standard_normal(number))
    is_sampled = rng.random(number) < settings["canary_rate"]
    present = np.sort(is_sampled + noise * rng.standard_normal(number))
    thresholds = np.quantile(np.concatenate([absent, present]), np.linspace(0, 1, settings["num_points"]))
    fpr = 1 - np.searchsorted(absent, thresholds, side="right") / number
    return fpr, np.searchsorted(present, thresholds, side="right") / number


_CURVE, _APPROXIMATE = "f-DP(CP)", "(eps,delta)(CP)"
_METHODS = _CURVE, "f-DP(joint)", _APPROXIMATE, "(eps,delta)(joint)"


def _with_optimal(thresholds: FloatArray, noise: float) -> FloatArray:
    return np.append(thresholds, Optimal(noise).threshold(DELTA))


def _truth(settings: fig.Settings) -> float:
    return Gaussian().epsilon(1 / settings["noise"], DELTA)


def _title(settings: fig.Settings) -> str:
    return f"Mean epsilon of {settings['num_runs']} runs, truth {_truth(settings):.2f}"


class BoundByThreshold(fig.Figure):
    """The bounds of four methods at every threshold of a grid."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        return fig.crossed(run=range(settings["num_runs"]))

    def measure(self, _: fig.Key, work: fig.Work) -> list[fig.Row]:
        settings = work.settings
        grid = _with_optimal(np.linspace(-3.5, 4.5, settings["num_thresholds"]), settings["noise"])
        [counts] = simulate_counts([settings["num_observations"]], grid, settings["noise"], work.generator())
        return [
            {"threshold": float(threshold), **count_row(method, "fixed", counts.at(index))}
            for index, threshold in enumerate(grid)
            for method in _METHODS
        ]

    def picture(self, rows: fig.FigureRows, settings: fig.Settings) -> fig.Picture:
        edges = np.linspace(-3.5, 4.5, 41)
        scores = [
            fig.Series(
                label=f"scores {text} the canary",
                x=list(edges),
                y=list(np.diff(special.ndtr((edges - middle) / settings["noise"]))),
                mark=fig.Mark.STEPS,
            )
            for text, middle in (("without", 0.0), ("with", 1.0))
        ]
        truth = _truth(settings)
        bounds = fig.bounds_panel(rows, "threshold", "threshold", truth, title="bound at each threshold")
        shares = fig.Panel(
            title="expected distribution of scores",
            x_label="score",
            y_label="share",
            series=scores,
            x_range=(-3.5, 5.0),
        )
        return fig.Picture(panels=[bounds, shares], columns=2)

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        thresholds = np.array(sorted(rows.values("threshold")))
        optimal = float(thresholds[-1])
        near = [float(thresholds[np.abs(thresholds - at).argmin()]) for at in (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)]
        lines = [
            (method, *rows.only(method=method).mean_cells("threshold", (*near, optimal)))
            for method in _METHODS
        ]
        at_w = max(rows.only(method=_APPROXIMATE, threshold=optimal).numbers("epsilon"))
        return [
            fig.Table(
                title=_title(settings),
                header=("method", *(f"t = {at:.2f}" for at in near), f"w = {optimal:.2f}"),
                rows=lines,
            ),
            fig.comparison_table([("(eps,delta)(CP) at the optimal threshold", "0", f"at most {at_w:.2f}")]),
        ]


class ThresholdsByObservations(fig.Figure):
    """The bound at a few thresholds and at the optimal one, by number of observations."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        return fig.crossed(run=range(settings["num_runs"]))

    def measure(self, _: fig.Key, work: fig.Work) -> list[fig.Row]:
        settings = work.settings
        thresholds = _with_optimal(np.asarray(settings["thresholds"]), settings["noise"])
        rules = [*(f"threshold {value:g}" for value in thresholds[:-1]), f"optimal w = {thresholds[-1]:.2f}"]
        half = settings["thresholds"].index(0.5)
        sizes = log_spaced(100, settings["most"], settings["num_sizes"])
        rows = []
        for counts in simulate_counts(sizes, thresholds, settings["noise"], work.generator()):
            bounds = [count_row(_APPROXIMATE, rule, counts.at(index)) for index, rule in enumerate(rules)]
            bounds += [count_row(method, rules[half], counts.at(half)) for method in (_CURVE, "f-DP(joint)")]
            rows += [{"observations": counts.number, **row} for row in bounds]
        return rows

    def picture(self, rows: fig.FigureRows, settings: fig.Settings) -> fig.Picture:
        truth = _truth(settings)
        return fig.Picture(
            panels=[fig.bounds_panel(rows, "observations", "observations per side", truth, log_x=True)]
        )

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        powers = (10**3, 10**4, 5 * 10**4, 10**6, 10**7, 10**8, 25 * 10**7)
        shown = nearest(rows.values("observations"), powers)
        lines = [
            (label, *method_rows.mean_cells("observations", shown)) for label, method_rows in rows.by_method()
        ]
        header = ("method", *(f"{size:,}" for size in shown))
        return [
            fig.Table(title=_title(settings), header=header, rows=lines),
            fig.comparison_table([self._as_good(rows)]),
        ]

    def _as_good(self, rows: fig.FigureRows) -> tuple[str, str, str]:
        """Return how few observations the Gaussian curve needs to match the other bound with all of them."""
        sizes = rows.values("observations")
        rule = next(rule for rule in rows.values("rule") if rule.startswith("optimal"))
        largest = rows.only(method=_APPROXIMATE, rule=rule, observations=sizes[-1]).mean() or 0.0
        curve = rows.only(method=_CURVE, rule="threshold 0.5")
        enough = [size for size in sizes if (curve.only(observations=size).mean() or 0.0) >= largest]
        text = f"f-DP(CP) with the same bound as w with {sizes[-1]:,} observations"
        least = f"{enough[0]:,} ({sizes[-1] / enough[0]:,.0f} times fewer)" if enough else "not reached"
        return text, "5,000 times fewer", least

"""How the bound grows with the number of observations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpaudit.experiments.reproduction._bounds import CONFIDENCE, DELTA, best_row, count_row
from dpaudit.experiments.reproduction._curves import bounds_panel
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._mechanism import Counted, counted, log_spaced, nearest
from dpaudit.experiments.reproduction._picture import Panel, Picture, Table
from dpaudit.experiments.reproduction._scale import simulated
from dpaudit.experiments.reproduction._trained import OURS
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, mean, only, pairs_of, values_of
from dpaudit.experiments.reproduction._work import Work
from dpaudit.stats import Gaussian, Kind, Optimal
from dpaudit.stats.inference._betting import upper_mean

__all__ = ["OBSERVATIONS"]

_HALF, _W = "threshold 1/2", "optimal threshold w"
_BETS = 1  # tells its chance from that of the counts


def _cells(settings: Settings) -> list[Key]:
    return [
        {"claimed": epsilon, "run": run}
        for epsilon in settings["epsilons"]
        for run in range(settings["num_runs"])
    ]


def _measure(key: Key, work: Work) -> list[Row]:
    noise = 1 / Gaussian().with_epsilon(float(key["claimed"]), DELTA)
    # the two thresholds that are chosen before the data, then a grid for the paper's practice
    grid = np.linspace(0.5 - 6 * noise, 0.5 + 6 * noise, work.settings["num_thresholds"])
    chosen = [0.5, Optimal(noise).threshold(DELTA)]
    thresholds = np.unique(np.concatenate([chosen, grid]))
    places = [int(np.searchsorted(thresholds, one)) for one in chosen]
    numbers = log_spaced(100, work.settings["most"], work.settings["num_sizes"])
    rows = []
    for found in counted(numbers, thresholds, noise, work.generator()):
        rows += [{"observations": found.number, **row} for row in _bounds(found, *places)]
    few = [number for number in numbers if number <= work.settings["most_steps"]]
    return rows + _bets(few, noise, work.settings["num_canaries"], np.random.default_rng([work.seed, _BETS]))


def _bounds(found: Counted, half: int, optimal: int) -> list[Row]:
    sides = found.false_positives, found.false_negatives, found.number
    return [
        count_row("f-DP(CP)", _HALF, found.at(half)),
        count_row("f-DP(joint)", _HALF, found.at(half)),
        count_row("(eps,delta)(CP)", _W, found.at(optimal)),
        best_row("f-DP(CP)", *sides),
        best_row("(eps,delta)(CP)", *sides),
    ]


def _bets(numbers: Sequence[int], noise: float, num_canaries: int, rng: np.random.Generator) -> list[Row]:
    """One run of as many steps, with many canaries by fair coins in each: bets on the wrong guesses."""
    curve = Gaussian()
    wrong = rng.binomial(num_canaries, curve.balanced_error(1 / noise), max(numbers)) / num_canaries
    rows: list[Row] = []
    for number in numbers:
        most = upper_mean(wrong[:number], 1 - CONFIDENCE, num_canaries, number)
        rows.append(
            {
                "observations": number,
                "method": OURS,
                "rule": f"{num_canaries} canaries a step",
                "kind": str(Kind.CONFIDENCE),
                "epsilon": curve.epsilon(curve.from_balanced_error(most), DELTA),
            }
        )
    return rows


def _panel(rows: Rows, epsilon: float) -> Panel:
    return bounds_panel(
        only(rows, claimed=epsilon),
        "observations",
        "observations a side (our one run: steps)",
        epsilon,
        title=f"epsilon = {epsilon:g}",
        log_x=True,
        y_range=(0, 1.15 * epsilon),
    )


def _picture(rows: Rows, settings: Settings) -> Picture:
    return Picture(panels=[_panel(rows, epsilon) for epsilon in settings["epsilons"]], columns=2)


def _tables(rows: Rows, settings: Settings) -> list[Table]:
    shown = nearest(values_of(rows, "observations"), [10**power for power in range(2, 10)])
    lines = [
        (f"{epsilon:g}", f"{method}, {rule}", *(_shown(rows, epsilon, method, rule, size) for size in shown))
        for epsilon in settings["epsilons"]
        for method, rule in pairs_of(rows)
    ]
    over = [(f"{method}, {rule}", f"{_above(rows, method, rule):.1%}") for method, rule in pairs_of(rows)]
    return [
        Table(
            title=f"Mean epsilon of {settings['num_runs']} runs",
            header=("epsilon", "method", *(f"{size:,}" for size in shown)),
            rows=lines,
        ),
        Table(
            title="How many bounds exceed the truth (of confidence bounds 5 % may, on average)",
            header=("method", "above the truth"),
            rows=over,
        ),
    ]


def _shown(rows: Rows, epsilon: float, method: str, rule: str, size: int) -> str:
    found = mean(only(rows, claimed=epsilon, method=method, rule=rule, observations=size))
    return "" if found is None else f"{found:.2f}"


def _above(rows: Rows, method: str, rule: str) -> float:
    own = only(rows, method=method, rule=rule)
    return sum(float(row["epsilon"] or 0) > float(row["claimed"] or 0) for row in own) / len(own)


_USUAL = {
    "epsilons": (1.0, 2.0, 4.0, 6.0),
    "num_runs": 20,
    "most": 100_000_000,
    "most_steps": 100_000,
    "num_canaries": 64,
    "num_sizes": 25,
    "num_thresholds": 241,
}

OBSERVATIONS = Figure(
    name="observations",
    title="Bound against number of observations: the Gaussian curve and (epsilon, delta)",
    paper="Figure of section 4.1, 20 runs, delta = 1e-5: with the Gaussian curve 1,000 observations give a "
    "tight bound; with (epsilon, delta)-DP it takes 100 million.",
    settings=simulated(_USUAL, epsilons=(1.0, 4.0), num_runs=2, most=10_000, num_sizes=3),
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    remarks=(
        "The counts of errors are drawn instead of the scores, which is the same and needs no memory. The "
        "paper chooses thresholds on the counted data: those rows are heuristics, here the best of a grid. "
        "The Gaussian rows assume that the mechanism is Gaussian; (eps,delta) rows assume nothing. Ours, one "
        "run, bets on as many steps, with canaries that do not disturb each other.",
    ),
)

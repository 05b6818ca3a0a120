"""Figures with an audit of every step that have a form of their own: first steps, methods, and violations.

The others are studies whose figures follow from their settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dpaudit import stats
from dpaudit._io import map_array
from dpaudit.accounting import Claim
from dpaudit.experiments.reproduction import _figure as fig
from dpaudit.experiments.reproduction._simulation import CONFIDENCE, DELTA
from dpaudit.experiments.reproduction._trainings import (
    HALF,
    OURS,
    PAPER_METHODS,
    SAME_DATA,
    Study,
    claim_of,
    run_audit,
)


def draw_methods(rows: fig.FigureRows, _: Study) -> fig.Picture:
    """Return a panel per method with a line per variant, as in the paper."""
    return fig.Picture(
        panels=[_panel(method_rows, label) for label, method_rows in rows.by_method()], columns=2
    )


def _panel(rows: fig.FigureRows, title: str) -> fig.Panel:
    epsilons = sorted(rows.values("claimed"))
    lines = [
        fig.Series(
            label=name,
            x=epsilons,
            y=[rows.only(variant=name, claimed=epsilon).mean() or 0.0 for epsilon in epsilons],
        )
        for name in rows.values("variant")
    ]
    return fig.epsilon_panel(lines, epsilons, title)


_CORRECT, _CLIPPED, _SEEDS = "correct", "1: clipped after the mean", "2: noise of 100 seeds"
_CLAIMED = 1.27
# whether the method detects the violation in the paper's figures
_DETECTED_IN_PAPER = {
    _CLIPPED: dict.fromkeys(PAPER_METHODS, True),
    _SEEDS: {name: name.startswith(("f-DP", "eps-DP")) for name in PAPER_METHODS},
    "3: noise for 1.57": {name: name.startswith("f-DP") for name in PAPER_METHODS},
    "3: noise for 2.17": {name: name.startswith("f-DP") for name in PAPER_METHODS},
}


def detection_tables(rows: fig.FigureRows, _: Study) -> list[fig.Table]:
    """Return which methods detect each violation, here and in the paper."""
    names = [name for name in _DETECTED_IN_PAPER if rows.only(variant=name)]
    pairs = [
        *((method, SAME_DATA) for method in PAPER_METHODS),
        *((method, HALF) for method in (*PAPER_METHODS, OURS)),
    ]
    lines = [
        (fig.method_label(*pair), *(_detection_cell(rows, *pair, name) for name in names)) for pair in pairs
    ]
    title = f"Does the bound exceed the claimed {_CLAIMED}? (here / in the paper)"
    return [fig.Table(title=title, header=("method", *names), rows=lines)]


def _detection_cell(rows: fig.FigureRows, method: str, rule: str, name: str) -> str:
    epsilon = rows.only(variant=name, method=method, rule=rule).mean()
    ours = "yes" if epsilon is not None and epsilon > _CLAIMED else "no"
    said = _DETECTED_IN_PAPER[name].get(method) if rule == SAME_DATA else None
    return ours if said is None else f"{ours} / {'yes' if said else 'no'}"


def draw_violations(rows: fig.FigureRows, study: Study) -> fig.Picture:
    """Return the first two violations as bars and the third over the true epsilon, as in the paper."""
    panels = [_bars_beside_correct(rows, name) for name in (_CLIPPED, _SEEDS) if rows.only(variant=name)]
    scaled = fig.FigureRows(
        {**row, "true": true}
        for row in rows
        if (true := study.variants[str(row["variant"])].true_epsilon) is not None
    )
    over = fig.bounds_panel(scaled, "true", "true epsilon per step", _CLAIMED, title="3: too little noise")
    series = [*over.series, fig.diagonal(sorted(scaled.values("true")))]
    return fig.Picture(panels=[*panels, replace(over, series=series, level_label="claimed")])


def _bars_beside_correct(rows: fig.FigureRows, name: str) -> fig.Panel:
    names = (_CORRECT, name)
    shown = rows.where(lambda row: row["variant"] in names)
    return fig.bars_panel(shown, "variant", names, _CLAIMED, title=name, level_label="claimed")


_COLUMNS = "CIFAR-10 WRN-16", "Random WRN-16"
_PAPERS, _OURS = "paper", "ours"
# by mode: the name of a method, its inference and its threshold rule
_METHODS: Mapping[str, tuple[tuple[str, stats.Inference, stats.ThresholdRule], ...]] = {
    _PAPERS: (
        ("f-DP(ZB)", stats.Posterior(), stats.SameData()),
        ("f-DP(CP)", stats.ClopperPearson(), stats.SameData()),
        ("f-DP(joint)", stats.JointExact(), stats.Fixed(0.5)),
    ),
    _OURS: ((OURS, stats.Betting(), stats.Fixed(0.5)),),
}


class FirstSteps(fig.Figure):
    """Bounds from the first steps of a training run, composed over all steps."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        return fig.crossed(column=_COLUMNS, claimed=settings["epsilons"], mode=_METHODS)

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        one_run = {"mode": "one-run", "num_canaries": work.settings["num_canaries"]}
        values = run_audit(
            work,
            str(key["column"]),
            audit={
                **({"mode": "paper"} if key["mode"] == _PAPERS else one_run),
                "canary": {"kind": "crafted"},
                "methods": [],
            },
            training={"target_epsilon": key["claimed"]},
            threat_model="input",
        )
        claim = claim_of(values)
        scores, present = (np.array(map_array(work.folder / f"{name}.npy")) for name in ("scores", "present"))
        rows = []
        for number in work.settings["first"]:
            first = stats.Observations.from_presence(
                scores[:number],
                present[:number],
                normalized=True,
                paired=key["mode"] == _PAPERS,
                scores_of="step",
            )
            rows += [
                {"steps": number, **_bound(first, claim, *method)} for method in _METHODS[str(key["mode"])]
            ]
        return rows

    def picture(self, rows: fig.FigureRows, settings: fig.Settings) -> fig.Picture:
        panels = [
            fig.bounds_panel(
                rows.only(column=column, claimed=epsilon),
                "steps",
                "number of first steps used",
                epsilon,
                title=f"{column}, epsilon = {epsilon:g}",
                log_x=True,
            )
            for column in _COLUMNS
            for epsilon in settings["epsilons"]
        ]
        return fig.Picture(panels=panels, columns=len(settings["epsilons"]))

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        numbers = rows.values("steps")
        lines = [
            (column, f"{epsilon:g}", label, *method_rows.mean_cells("steps", numbers))
            for column in _COLUMNS
            for epsilon in settings["epsilons"]
            for label, method_rows in rows.only(column=column, claimed=epsilon).by_method()
        ]
        header = ("training", "epsilon", "method", *(f"{number:,} steps" for number in numbers))
        title = "Epsilon from the first steps, composed over all steps"
        return [fig.Table(title=title, header=header, rows=lines)]


def _bound(
    observations: stats.Observations,
    claim: Claim,
    method: str,
    inference: stats.Inference,
    threshold: stats.ThresholdRule,
) -> fig.Row:
    bound = stats.lower_bound(
        observations,
        delta=DELTA,
        confidence=CONFIDENCE,
        tradeoff=stats.Gaussian(),
        inference=inference,
        threshold=threshold,
    )
    epsilon = claim.hypothesis(stats.Gaussian()).epsilon(bound.parameter)
    rule = SAME_DATA if isinstance(threshold, stats.SameData) else HALF
    return {"method": method, "rule": rule, "kind": str(bound.kind), "epsilon": epsilon}

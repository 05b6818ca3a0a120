"""Whether the first steps of a training run leak more than later ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpaudit._io import map_array
from dpaudit.accounting import Claim
from dpaudit.experiments.reproduction._figure import (
    CIFAR10,
    Figure,
    Key,
    Picture,
    Row,
    Rows,
    Scale,
    Settings,
    Table,
    Work,
    crossed,
)
from dpaudit.experiments.reproduction._panels import bounds_panel, by_method, mean_cells, only, values_of
from dpaudit.experiments.reproduction._simulation import CONFIDENCE, DELTA
from dpaudit.experiments.reproduction._trainings import (
    HALF,
    OURS,
    PAPER_WIDE,
    SAME_DATA,
    TINY,
    claim_of,
    run_audit,
    sizes,
)
from dpaudit.stats import (
    Betting,
    ClopperPearson,
    Fixed,
    Gaussian,
    Inference,
    JointExact,
    Observations,
    Posterior,
    SameData,
    ThresholdRule,
    lower_bound,
)

_COLUMNS = "CIFAR-10 WRN-16", "Random WRN-16"
_PAPERS, _OURS = "paper", "ours"
# by mode: the name of a method, its inference and its threshold rule
_METHODS: Mapping[str, tuple[tuple[str, Inference, ThresholdRule], ...]] = {
    _PAPERS: (
        ("f-DP(ZB)", Posterior(), SameData()),
        ("f-DP(CP)", ClopperPearson(), SameData()),
        ("f-DP(joint)", JointExact(), Fixed(0.5)),
    ),
    _OURS: ((OURS, Betting(), Fixed(0.5)),),
}


class FirstSteps(Figure):
    """Bounds from the first steps of a training run, composed over all steps."""

    def cells(self, settings: Settings) -> list[Key]:
        return crossed(column=_COLUMNS, claimed=settings["epsilons"], mode=_METHODS)

    def measure(self, key: Key, work: Work) -> list[Row]:
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
            first = Observations.from_presence(
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

    def picture(self, rows: Rows, settings: Settings) -> Picture:
        panels = [
            bounds_panel(
                only(rows, column=column, claimed=epsilon),
                "steps",
                "number of first steps used",
                epsilon,
                title=f"{column}, epsilon = {epsilon:g}",
                log_x=True,
            )
            for column in _COLUMNS
            for epsilon in settings["epsilons"]
        ]
        return Picture(panels=panels, columns=len(settings["epsilons"]))

    def tables(self, rows: Rows, settings: Settings) -> list[Table]:
        numbers = values_of(rows, "steps")
        lines = [
            (column, f"{epsilon:g}", label, *mean_cells(own, "steps", numbers))
            for column in _COLUMNS
            for epsilon in settings["epsilons"]
            for label, own in by_method(only(rows, column=column, claimed=epsilon))
        ]
        header = ("training", "epsilon", "method", *(f"{number:,} steps" for number in numbers))
        title = "Epsilon from the first steps, composed over all steps"
        return [Table(title=title, header=header, rows=lines)]


def _bound(
    observations: Observations, claim: Claim, method: str, inference: Inference, threshold: ThresholdRule
) -> Row:
    bound = lower_bound(
        observations,
        delta=DELTA,
        confidence=CONFIDENCE,
        tradeoff=Gaussian(),
        inference=inference,
        threshold=threshold,
    )
    epsilon = claim.hypothesis(Gaussian()).epsilon(bound.parameter)
    rule = SAME_DATA if isinstance(threshold, SameData) else HALF
    return {"method": method, "rule": rule, "kind": str(bound.kind), "epsilon": epsilon}


STEPS = FirstSteps(
    name="steps",
    title="Crafted input canaries in the first steps of training",
    paper="Figure in appendix D.1: on CIFAR-10, the first steps leak more than later ones; on random data, "
    "they do not.",
    settings={
        Scale.TINY: {
            "columns": dict.fromkeys(_COLUMNS, TINY),
            "epsilons": (8.0,),
            "first": (1, 2),
            "num_canaries": 16,  # so that the first step has both present and absent ones
        },
        Scale.CPU: {
            "columns": dict.fromkeys(_COLUMNS, sizes(49, 4, 240, 0.02)),
            "epsilons": (1.0, 8.0),
            "first": (15, 30, 60, 120, 240),
            "num_canaries": 4,
        },
        Scale.PAPER: {
            "columns": dict.fromkeys(_COLUMNS, PAPER_WIDE),
            "epsilons": (1.0, 4.0, 8.0, 16.0),
            "first": (50, 100, 250, 500, 1000, 2500),
            "num_canaries": 64,
        },
    },
    needs=(CIFAR10,),
    remarks=("All points of a line come from the same training run, so they are dependent.",),
)

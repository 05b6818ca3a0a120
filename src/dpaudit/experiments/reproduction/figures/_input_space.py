"""Input canaries: four kinds, and the best one on all data."""

from __future__ import annotations

from dpaudit.experiments.reproduction._figure import CIFAR10, PURCHASE, Panel, Picture, Rows, Scale, Series
from dpaudit.experiments.reproduction._panels import (
    epsilon_panel,
    labelled,
    mean,
    only,
    pairs_of,
    values_of,
)
from dpaudit.experiments.reproduction._trainings import (
    ALL_DATA,
    PAPER_CONV,
    PAPER_DENSE,
    PAPER_WIDE,
    TINY,
    Study,
    Variant,
    on_all_data,
    sizes,
    study_settings,
)

_WIDE = "CIFAR-10 WRN-16"
_KINDS = "mislabelled", "blank", "adversarial", "crafted"
_PLAIN = (
    "Scores are plain dot products, in which the other examples are noise too, with the threshold 1/2 that "
    "supposes a gradient as long as the clipping norm; the best threshold on the same data is the paper's "
    "practice and a heuristic."
)


INPUT_CANARIES = Study(
    name="input-canaries",
    title="Four kinds of input canaries on CIFAR-10 with WRN-16",
    paper="Figure of appendix C.3: crafted canaries give clearly larger bounds than mislabelled, blank and "
    "adversarial ones.",
    needs=(CIFAR10,),
    variants={kind: Variant(column=_WIDE, audit={"canary": {"kind": kind}}) for kind in _KINDS},
    threat_model="input",
    methods=("f-DP(CP)", "f-DP(ZB)"),
    settings={
        Scale.TINY: study_settings({_WIDE: TINY}, num_runs=1, num_canaries=2),
        Scale.CPU: study_settings({_WIDE: sizes(49, 4, 60, 0.03)}, num_runs=2, num_canaries=4),
        Scale.PAPER: study_settings(
            {_WIDE: PAPER_WIDE}, num_runs=10, num_canaries=64, audit={"first_steps": 250}
        ),
    },
    remarks=(_PLAIN,),
)


def _by_method(rows: Rows) -> Picture:
    """Return a panel for each method, a line for each training, as in the paper."""
    return Picture(panels=[_panel(rows, *pair) for pair in pairs_of(rows)], columns=2)


def _panel(rows: Rows, method: str, rule: str) -> Panel:
    own = only(rows, method=method, rule=rule)
    epsilons = sorted(values_of(own, "claimed"))
    lines = [
        Series(
            label=name,
            x=epsilons,
            y=[mean(only(own, variant=name, claimed=epsilon)) or 0.0 for epsilon in epsilons],
        )
        for name in values_of(own, "variant")
    ]
    return epsilon_panel(lines, epsilons, labelled(method, rule))


INPUT_DATASETS = Study(
    name="input-datasets",
    title="Crafted input canaries on all data",
    paper="Figure of section 6.4, the first 250 steps: with WRN-16 the bounds are tight for epsilon below 10 "
    "on all data, with the ConvNet they are far below.",
    needs=(CIFAR10, PURCHASE),
    variants={name: Variant(column=name, audit={"canary": {"kind": "crafted"}}) for name in ALL_DATA},
    draw=_by_method,
    threat_model="input",
    methods=("f-DP(CP)", "f-DP(ZB)"),
    settings={
        Scale.TINY: study_settings(on_all_data(TINY, TINY, TINY), num_runs=1, num_canaries=2),
        Scale.CPU: study_settings(
            on_all_data(sizes(49, 4, 30, 0.03), sizes(49, 4, 250, 0.02), sizes(800, 64, 250, 0.2)),
            num_runs=1,
            num_canaries=4,
            epsilons=(1.0, 4.0, 8.0, 16.0),
        ),
        Scale.PAPER: study_settings(
            on_all_data(PAPER_WIDE, PAPER_CONV, PAPER_DENSE),
            num_runs=10,
            num_canaries=64,
            epsilons=(1.0, 4.0, 8.0, 16.0),
            audit={"first_steps": 250},
        ),
    },
    remarks=(
        _PLAIN,
        "The paper looks at the first 250 of 2,500 steps, with noise for all of them. Below its scale the "
        "training ends where the looking ends, so there is less noise in a step at the same epsilon.",
    ),
)

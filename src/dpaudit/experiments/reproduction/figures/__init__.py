"""All tables and figures of the paper; those with the same setup share a module."""

import difflib

from dpaudit.errors import InputError
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction.figures._black_box import BLACK_BOX, CLIPPING_ONLY
from dpaudit.experiments.reproduction.figures._bugs import BUGS
from dpaudit.experiments.reproduction.figures._canary_studies import (
    AUGMULT,
    CANARY_GRADIENTS,
    FLAGSHIP,
    INPUT_CANARIES,
    INPUT_DATASETS,
    MODEL_SIZE,
    TABLE1,
)
from dpaudit.experiments.reproduction.figures._first_steps import STEPS
from dpaudit.experiments.reproduction.figures._observation_counts import OBSERVATIONS, SUBSAMPLING
from dpaudit.experiments.reproduction.figures._thresholds import THRESHOLD_OBSERVATIONS, THRESHOLDS
from dpaudit.experiments.reproduction.figures._tradeoff_curves import PLD, REGIONS, TRADEOFFS

__all__ = ["FIGURES", "figure_named"]

FIGURES = (
    TRADEOFFS,
    REGIONS,
    OBSERVATIONS,
    PLD,
    SUBSAMPLING,
    THRESHOLDS,
    THRESHOLD_OBSERVATIONS,
    TABLE1,
    FLAGSHIP,
    BUGS,
    CANARY_GRADIENTS,
    INPUT_CANARIES,
    INPUT_DATASETS,
    STEPS,
    CLIPPING_ONLY,
    BLACK_BOX,
    MODEL_SIZE,
    AUGMULT,
)


def figure_named(name: str) -> Figure:
    """Return the figure with this name."""
    known = {figure.name: figure for figure in FIGURES}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}."
    raise InputError(f"Expected the name of a figure or table, got {name!r}: {hint}")

"""One module for each table or figure of the paper, or for two that share their numbers."""

import difflib

from dpaudit.errors import InputError
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction.figures._black_box import BLACK_BOX
from dpaudit.experiments.reproduction.figures._bugs import BUGS
from dpaudit.experiments.reproduction.figures._canary_gradients import CANARY_GRADIENTS
from dpaudit.experiments.reproduction.figures._clipping_only import CLIPPING_ONLY
from dpaudit.experiments.reproduction.figures._input_canaries import INPUT_CANARIES, INPUT_DATASETS
from dpaudit.experiments.reproduction.figures._model_size import AUGMULT, MODEL_SIZE
from dpaudit.experiments.reproduction.figures._observations import OBSERVATIONS
from dpaudit.experiments.reproduction.figures._pld import PLD
from dpaudit.experiments.reproduction.figures._regions import REGIONS
from dpaudit.experiments.reproduction.figures._steps import STEPS
from dpaudit.experiments.reproduction.figures._subsampling import SUBSAMPLING
from dpaudit.experiments.reproduction.figures._table1 import FLAGSHIP, TABLE1
from dpaudit.experiments.reproduction.figures._threshold_observations import THRESHOLD_OBSERVATIONS
from dpaudit.experiments.reproduction.figures._thresholds import THRESHOLDS
from dpaudit.experiments.reproduction.figures._tradeoffs import TRADEOFFS

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
    """The figure of this name."""
    known = {figure.name: figure for figure in FIGURES}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"{', '.join(known)}."
    raise InputError(f"Expected the name of a figure or table, got {name!r}: {hint}")

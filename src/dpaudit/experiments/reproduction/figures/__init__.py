"""All tables and figures of the paper; those with the same setup share a module."""

import difflib

from dpaudit.errors import InputError
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction.figures._black_box import FINAL_MODELS
from dpaudit.experiments.reproduction.figures._bugs import BUGS
from dpaudit.experiments.reproduction.figures._canary_studies import STUDIES
from dpaudit.experiments.reproduction.figures._simulated_counts import SIMULATIONS
from dpaudit.experiments.reproduction.figures._tradeoff_curves import CURVES

__all__ = ["FIGURES", "figure_named"]

FIGURES: tuple[Figure, ...] = (*CURVES, *SIMULATIONS, *STUDIES, BUGS, *FINAL_MODELS)


def figure_named(name: str) -> Figure:
    """Return the figure with this name."""
    figures = {figure.name: figure for figure in FIGURES}
    if name in figures:
        return figures[name]
    near = difflib.get_close_matches(name, figures, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(figures)}."
    raise InputError(f"Expected the name of a figure or table, got {name!r}: {hint}")

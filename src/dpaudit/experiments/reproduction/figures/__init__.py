"""All tables and figures of the paper; those with the same setup share a module."""

from dpaudit import _validate
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
    hint = _validate.suggestion(name, figures) or f" Choose from {', '.join(figures)}."
    raise InputError(f"There is no figure or table {name!r}.{hint}")

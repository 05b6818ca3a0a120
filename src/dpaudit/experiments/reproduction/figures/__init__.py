"""All tables and figures of the paper, from ``figures.toml``, which names the class that measures each."""

from collections.abc import Mapping
from typing import Any

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.experiments.reproduction._figure import CATALOGUE, NEEDS, Figure, Scale, Settings
from dpaudit.experiments.reproduction._trainings import Study, Variant
from dpaudit.experiments.reproduction.figures import (  # define the classes of figures
    _black_box,  # noqa: F401
    _canary_studies,
    _simulated_counts,  # noqa: F401
    _tradeoff_curves,  # noqa: F401
)

__all__ = ["FIGURES", "figure_named"]

_FORMS: dict[str, dict[str, Any]] = {
    "methods": {"draw": _canary_studies.draw_methods},
    "violations": {"draw": _canary_studies.draw_violations, "more_tables": _canary_studies.detection_tables},
}


def _figure(table: dict[str, Any]) -> Figure:
    """Return the figure that a table describes; its keys are the fields of its class."""
    name, usual, remarks = table.pop("class"), table["settings"]["cpu"], table.get("remarks", ())
    [kind] = [figure for figure in Figure.__subclasses__() if figure.__name__ == name]
    if kind is Study:
        variants = table["variants"].items()
        table["variants"] = {name: Variant(**{"column": name, **changes}) for name, changes in variants}
        table |= _FORMS.get(table.pop("form", ""), {})
    settings = {scale: _settings({**usual, **table["settings"].get(scale, {})}) for scale in Scale}
    needs = tuple(NEEDS[need] for need in table.get("needs", ()))
    texts = tuple(CATALOGUE["remark"].get(remark, remark) for remark in remarks)
    return kind(**{**table, "settings": settings, "needs": needs, "remarks": texts})


def _settings(table: Mapping[str, Any]) -> Settings:
    """Return settings in which the size of a training run has the names of its numbers."""
    if "columns" not in table:
        return table
    return {**table, "columns": {column: _size(size) for column, size in table["columns"].items()}}


def _size(size: str | list[float]) -> dict[str, Any]:
    if isinstance(size, str):
        return {"num_examples": None, "num_test": None, **CATALOGUE["size"][size]}
    names = "num_examples", "batch_size", "num_steps", "learning_rate", "num_test"
    return {"num_test": 256, **dict(zip(names, size, strict=False))}


FIGURES = tuple(map(_figure, CATALOGUE["figure"]))


def figure_named(name: str) -> Figure:
    """Return the figure with this name."""
    figures = {figure.name: figure for figure in FIGURES}
    if name in figures:
        return figures[name]
    hint = _validate.suggestion(name, figures) or f" Choose from {', '.join(figures)}."
    raise InputError(f"There is no figure or table {name!r}.{hint}")

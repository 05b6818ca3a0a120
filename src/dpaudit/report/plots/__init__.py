"""Pictures as SVG: no library, no network, and each with its numbers as a table."""

from dpaudit.report.plots._course import compared_figure, course_figure
from dpaudit.report.plots._figure import table
from dpaudit.report.plots._methods import methods_figure
from dpaudit.report.plots._plane import close_figure, needs_close_figure, plane_figure
from dpaudit.report.plots._scale import number
from dpaudit.report.plots._scores import scores_figure

__all__ = [
    "close_figure",
    "compared_figure",
    "course_figure",
    "methods_figure",
    "needs_close_figure",
    "number",
    "plane_figure",
    "scores_figure",
    "table",
]

"""The paper's tables and figures, each reproduced by one call; ``dpaudit.report`` draws them.

Simulations need numpy and scipy only. Trainings need torch and pydantic, which are loaded when the first
cell of one is measured.
"""

from dpaudit.experiments.reproduction._figure import (
    Data,
    Figure,
    Mark,
    Need,
    Panel,
    Picture,
    Scale,
    Series,
    Table,
    Work,
)
from dpaudit.experiments.reproduction._reproduce import Reproduced, reproduce
from dpaudit.experiments.reproduction.figures import FIGURES, figure_named

__all__ = [
    "FIGURES",
    "Data",
    "Figure",
    "Mark",
    "Need",
    "Panel",
    "Picture",
    "Reproduced",
    "Scale",
    "Series",
    "Table",
    "Work",
    "figure_named",
    "reproduce",
]

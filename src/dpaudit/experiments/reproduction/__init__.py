"""The paper's tables and figures, each by one call: measured in cells that are kept, drawn elsewhere.

Simulations need numpy and scipy only. Trainings need torch and pydantic, which are loaded when the first
cell of one is measured.
"""

from dpaudit.experiments.reproduction._data import Data, Need
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._picture import Mark, Panel, Picture, Series, Table
from dpaudit.experiments.reproduction._reproduce import Reproduced, reproduce
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._work import Work
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

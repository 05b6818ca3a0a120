"""The paper's tables and figures, each reproduced by one call; ``dpaudit.report`` draws them.

Simulations need only numpy and scipy. Figures that train models need torch and pydantic, which are imported
when their first cell is measured.
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

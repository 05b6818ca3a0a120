"""One module for each table or figure of the paper."""

from dpaudit.experiments.reproduction.figures._observations import OBSERVATIONS
from dpaudit.experiments.reproduction.figures._pld import PLD
from dpaudit.experiments.reproduction.figures._regions import REGIONS
from dpaudit.experiments.reproduction.figures._subsampling import SUBSAMPLING
from dpaudit.experiments.reproduction.figures._threshold_observations import THRESHOLD_OBSERVATIONS
from dpaudit.experiments.reproduction.figures._thresholds import THRESHOLDS
from dpaudit.experiments.reproduction.figures._tradeoffs import TRADEOFFS

__all__ = ["FIGURES"]

FIGURES = (
    TRADEOFFS,
    REGIONS,
    OBSERVATIONS,
    PLD,
    SUBSAMPLING,
    THRESHOLDS,
    THRESHOLD_OBSERVATIONS,
)

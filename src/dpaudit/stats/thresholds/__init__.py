"""Threshold rules: above which value a score is called "present"."""

from dpaudit.stats.thresholds._chosen import HeldOut, Predictable, SameData, predictable_bets
from dpaudit.stats.thresholds._order_statistics import Simultaneous, Tails
from dpaudit.stats.thresholds._rules import BestOf, Fixed, Optimal, ThresholdRule

__all__ = [
    "BestOf",
    "Fixed",
    "HeldOut",
    "Optimal",
    "Predictable",
    "SameData",
    "Simultaneous",
    "Tails",
    "ThresholdRule",
    "predictable_bets",
]

"""Trade-off families: which error rates a mechanism allows."""

from dpaudit.stats.tradeoffs._attack import Attack, sampled_attack
from dpaudit.stats.tradeoffs._families import (
    ApproximateDP,
    Gaussian,
    Laplace,
    PureDP,
    RandomizedResponse,
    TradeOff,
    approximate_fnr,
    ratio_epsilon,
)
from dpaudit.stats.tradeoffs._piecewise import PiecewiseLinear, lower_hull

__all__ = [
    "ApproximateDP",
    "Attack",
    "Gaussian",
    "Laplace",
    "PiecewiseLinear",
    "PureDP",
    "RandomizedResponse",
    "TradeOff",
    "approximate_fnr",
    "lower_hull",
    "ratio_epsilon",
    "sampled_attack",
]

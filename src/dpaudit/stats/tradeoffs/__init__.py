"""Trade-off families: which error rates a mechanism allows."""

from dpaudit.stats.tradeoffs._families import (
    MECHANISMS,
    Attack,
    Gaussian,
    Laplace,
    TradeOff,
    sampled_attack,
    signal_share,
)
from dpaudit.stats.tradeoffs._piecewise import (
    ApproximateDP,
    PiecewiseLinear,
    PureDP,
    RandomizedResponse,
    approximate_fnr,
    lower_hull,
    ratio_epsilon,
)

__all__ = [
    "MECHANISMS",
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
    "signal_share",
]

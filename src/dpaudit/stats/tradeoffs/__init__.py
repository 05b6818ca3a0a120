"""Trade-off families: which error rates a mechanism allows."""

from dpaudit.stats.tradeoffs._base import TradeOff
from dpaudit.stats.tradeoffs._families import ApproximateDP, Gaussian, Laplace, PureDP, RandomizedResponse
from dpaudit.stats.tradeoffs._piecewise import PiecewiseLinear

__all__ = [
    "ApproximateDP",
    "Gaussian",
    "Laplace",
    "PiecewiseLinear",
    "PureDP",
    "RandomizedResponse",
    "TradeOff",
]

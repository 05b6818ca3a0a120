"""Trade-off families: what the mechanism's error rates can be."""

from dpaudit.stats.tradeoffs._approximate import ApproximateDP, PureDP
from dpaudit.stats.tradeoffs._base import TradeOff
from dpaudit.stats.tradeoffs._gaussian import Gaussian
from dpaudit.stats.tradeoffs._laplace import Laplace
from dpaudit.stats.tradeoffs._lines import PiecewiseLinear
from dpaudit.stats.tradeoffs._randomized_response import RandomizedResponse

__all__ = [
    "ApproximateDP",
    "Gaussian",
    "Laplace",
    "PiecewiseLinear",
    "PureDP",
    "RandomizedResponse",
    "TradeOff",
]

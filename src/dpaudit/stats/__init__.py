"""Statistics of the audit: from scores to bounds and verdicts. Needs numpy and scipy only."""

from dpaudit.stats._audit import audit
from dpaudit.stats._bound import Bound
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._lower_bound import lower_bound
from dpaudit.stats._observations import Observations
from dpaudit.stats._one_run import one_run_bound, one_run_fdp_bound
from dpaudit.stats._one_run_guesses import Guesses
from dpaudit.stats._question import Kind
from dpaudit.stats._result import Power, Result
from dpaudit.stats._verdict import Verdict
from dpaudit.stats.inference import (
    Betting,
    ClopperPearson,
    Inference,
    JointExact,
    KatzLog,
    Posterior,
)
from dpaudit.stats.thresholds import (
    Fixed,
    HeldOut,
    Optimal,
    Predictable,
    SameData,
    Simultaneous,
    ThresholdRule,
)
from dpaudit.stats.tradeoffs import (
    ApproximateDP,
    Gaussian,
    Laplace,
    PiecewiseLinear,
    PureDP,
    RandomizedResponse,
    TradeOff,
)

__all__ = [
    "ApproximateDP",
    "Betting",
    "Bound",
    "ClopperPearson",
    "ErrorCounts",
    "Fixed",
    "Gaussian",
    "Guesses",
    "HeldOut",
    "Inference",
    "JointExact",
    "KatzLog",
    "Kind",
    "Laplace",
    "Observations",
    "Optimal",
    "PiecewiseLinear",
    "Posterior",
    "Power",
    "Predictable",
    "PureDP",
    "RandomizedResponse",
    "Result",
    "SameData",
    "Simultaneous",
    "ThresholdRule",
    "TradeOff",
    "Verdict",
    "audit",
    "lower_bound",
    "one_run_bound",
    "one_run_fdp_bound",
]

"""Statistics of audits: from scores to bounds and verdicts. Requires only numpy and scipy."""

from dpaudit._types import FloatArray, IntArray
from dpaudit.stats._audit import audit, lower_bound
from dpaudit.stats._binomial import Region, plausible_counts
from dpaudit.stats._bound import Bound
from dpaudit.stats._counts import ErrorCounts, Guesses
from dpaudit.stats._coverage import Coverage, coverage, ideal_observations, tally
from dpaudit.stats._estimate import Estimate, Interval, Shape
from dpaudit.stats._observations import Observations
from dpaudit.stats._one_run import one_run_bound, one_run_fdp_bound
from dpaudit.stats._planning import Leak, Plan, plan_canaries, plan_observations, plan_steps, smallest_leak
from dpaudit.stats._power import Power
from dpaudit.stats._result import ClaimPart, Result, Verdict
from dpaudit.stats._roc_band import RocBand
from dpaudit.stats.inference import (
    Betting,
    BoundQuery,
    ClopperPearson,
    CountInference,
    ExactInference,
    Inference,
    JointExact,
    KatzLog,
    Kind,
    Posterior,
    ThresholdResult,
)
from dpaudit.stats.thresholds import (
    BestOf,
    Fixed,
    HeldOut,
    Optimal,
    Predictable,
    SameData,
    Simultaneous,
    Tails,
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
    "BestOf",
    "Betting",
    "Bound",
    "BoundQuery",
    "ClaimPart",
    "ClopperPearson",
    "CountInference",
    "Coverage",
    "ErrorCounts",
    "Estimate",
    "ExactInference",
    "Fixed",
    "FloatArray",
    "Gaussian",
    "Guesses",
    "HeldOut",
    "Inference",
    "IntArray",
    "Interval",
    "JointExact",
    "KatzLog",
    "Kind",
    "Laplace",
    "Leak",
    "Observations",
    "Optimal",
    "PiecewiseLinear",
    "Plan",
    "Posterior",
    "Power",
    "Predictable",
    "PureDP",
    "RandomizedResponse",
    "Region",
    "Result",
    "RocBand",
    "SameData",
    "Shape",
    "Simultaneous",
    "Tails",
    "ThresholdResult",
    "ThresholdRule",
    "TradeOff",
    "Verdict",
    "audit",
    "coverage",
    "ideal_observations",
    "lower_bound",
    "one_run_bound",
    "one_run_fdp_bound",
    "plan_canaries",
    "plan_observations",
    "plan_steps",
    "plausible_counts",
    "smallest_leak",
    "tally",
]

"""Inference methods: from error counts to the largest refuted parameter."""

from dpaudit.stats.inference._base import (
    BoundQuery,
    CountInference,
    ExactInference,
    Inference,
    Kind,
    RankInference,
    ThresholdResult,
)
from dpaudit.stats.inference._betting import Betting, FarRates, StepBets, far_rates
from dpaudit.stats.inference._classical import (
    ClopperPearson,
    KatzLog,
    Posterior,
    Region,
    binomial_cdf,
    plausible_counts,
    plausible_rate,
)
from dpaudit.stats.inference._joint_exact import JointExact
from dpaudit.stats.inference._stop_loss import AdvantageBets, StopLosses

__all__ = [
    "AdvantageBets",
    "Betting",
    "BoundQuery",
    "ClopperPearson",
    "CountInference",
    "ExactInference",
    "FarRates",
    "Inference",
    "JointExact",
    "KatzLog",
    "Kind",
    "Posterior",
    "RankInference",
    "Region",
    "StepBets",
    "StopLosses",
    "ThresholdResult",
    "binomial_cdf",
    "far_rates",
    "plausible_counts",
    "plausible_rate",
]

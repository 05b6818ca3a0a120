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
from dpaudit.stats.inference._betting import Betting
from dpaudit.stats.inference._classical import ClopperPearson, KatzLog, Posterior
from dpaudit.stats.inference._joint_exact import JointExact

__all__ = [
    "Betting",
    "BoundQuery",
    "ClopperPearson",
    "CountInference",
    "ExactInference",
    "Inference",
    "JointExact",
    "KatzLog",
    "Kind",
    "Posterior",
    "RankInference",
    "ThresholdResult",
]

"""Inferences: from counted errors to the largest refuted parameter."""

from dpaudit.stats.inference._base import CountInference, ExactInference, Inference
from dpaudit.stats.inference._betting import Betting
from dpaudit.stats.inference._clopper_pearson import ClopperPearson
from dpaudit.stats.inference._joint_exact import JointExact
from dpaudit.stats.inference._katz import KatzLog
from dpaudit.stats.inference._posterior import Posterior

__all__ = [
    "Betting",
    "ClopperPearson",
    "CountInference",
    "ExactInference",
    "Inference",
    "JointExact",
    "KatzLog",
    "Posterior",
]

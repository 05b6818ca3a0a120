"""Bounds of counts and scores as rows, under the names of the paper."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpaudit.experiments.reproduction._values import Row
from dpaudit.stats import (
    ApproximateDP,
    ClopperPearson,
    ErrorCounts,
    Gaussian,
    Inference,
    JointExact,
    KatzLog,
    Kind,
    Posterior,
    PureDP,
    TradeOff,
    lower_bound,
)
from dpaudit.stats._bound import plain
from dpaudit.stats._question import Question
from dpaudit.stats._types import IntArray

__all__ = ["CONFIDENCE", "DELTA", "METHODS", "best_row", "count_row"]

DELTA = 1e-5
CONFIDENCE = 0.95
METHODS: Mapping[str, tuple[TradeOff, Inference]] = {
    "f-DP(CP)": (Gaussian(), ClopperPearson()),
    "f-DP(ZB)": (Gaussian(), Posterior()),
    "(eps,delta)(CP)": (ApproximateDP(), ClopperPearson()),
    "(eps,delta)(ZB)": (ApproximateDP(), Posterior()),
    "eps-DP(Katz)": (PureDP(), KatzLog()),
    "f-DP(joint)": (Gaussian(), JointExact()),
    "(eps,delta)(joint)": (ApproximateDP(), JointExact()),
}


def count_row(method: str, rule: str, counts: ErrorCounts) -> Row:
    """The bound of counts at a threshold that was chosen before the data."""
    tradeoff, inference = METHODS[method]
    delta = 0.0 if isinstance(inference, KatzLog) else DELTA
    bound = lower_bound(counts, delta=delta, confidence=CONFIDENCE, tradeoff=tradeoff, inference=inference)
    return {"method": method, "rule": rule, "kind": str(bound.kind), "epsilon": plain(bound.epsilon)}


def best_row(method: str, false_positives: IntArray, false_negatives: IntArray, number: int) -> Row:
    """The largest of Clopper and Pearson's bounds at many thresholds: the paper's practice, not a bound."""
    tradeoff, inference = METHODS[method]
    assert isinstance(inference, ClopperPearson)
    question = Question(tradeoff.at(DELTA), DELTA, 1 - CONFIDENCE)
    sizes = ErrorCounts.perfect(number, number)
    parameter = float(np.max(inference.rank(false_positives, false_negatives, sizes, question)))
    epsilon = question.tradeoff.epsilon(parameter, DELTA)
    return {
        "method": method,
        "rule": "best on the same data",
        "kind": str(Kind.HEURISTIC),
        "epsilon": plain(epsilon),
    }

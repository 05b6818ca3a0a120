"""Which sound method to use, decided from the shape of the observations alone."""

from __future__ import annotations

from dpaudit.stats._observations import Observations
from dpaudit.stats.inference import Betting, ClopperPearson, Inference, JointExact
from dpaudit.stats.thresholds import Fixed, HeldOut, Predictable, Simultaneous, ThresholdRule

__all__ = ["default_method"]


def default_method(
    observations: Observations, inference: Inference | None, rule: ThresholdRule | None
) -> tuple[Inference, ThresholdRule]:
    """Fill in what was not given. Must not look at the scores: that would be choosing on the data."""
    if inference is None:
        inference = _inference(observations, rule)
    if rule is None:
        rule = _rule(observations, inference)
    return inference, rule


def _inference(observations: Observations, rule: ThresholdRule | None) -> Inference:
    if isinstance(rule, Simultaneous):
        return ClopperPearson()
    if isinstance(rule, Predictable) or observations.is_stepped:
        return Betting()
    return JointExact()


def _rule(observations: Observations, inference: Inference) -> ThresholdRule:
    if observations.normalized:
        return Fixed(0.5)
    if isinstance(inference, Betting):
        return Predictable()
    return HeldOut()

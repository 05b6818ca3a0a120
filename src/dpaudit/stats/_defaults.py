"""Which sound method to use, decided from the shape of the observations and the claim alone.

What was simulated to decide is in docs/soundness.md, "How the defaults were chosen".
"""

from __future__ import annotations

from dpaudit.stats._observations import Observations
from dpaudit.stats.inference import Betting, ClopperPearson, Inference, JointExact
from dpaudit.stats.thresholds import Fixed, HeldOut, Predictable, Simultaneous, ThresholdRule
from dpaudit.stats.tradeoffs import ApproximateDP, PureDP, TradeOff

__all__ = ["default_method"]

_FEW = 10  # below, a part held out has nothing to choose on
_MANY = 5000  # from here on bands beat a held-out part, where the threshold matters


def default_method(
    observations: Observations,
    tradeoff: TradeOff,
    inference: Inference | None = None,
    rule: ThresholdRule | None = None,
) -> tuple[Inference, ThresholdRule]:
    """Fill in what was not given. Must not look at the scores: that would be choosing on the data."""
    if rule is None:
        rule = _rule(observations, tradeoff, inference)
    if inference is None:
        inference = _inference(observations, rule)
    return inference, rule


def _rule(observations: Observations, tradeoff: TradeOff, inference: Inference | None) -> ThresholdRule:
    if observations.normalized:
        return Fixed(0.5)
    if isinstance(inference, Betting) or (inference is None and observations.is_stepped):
        return Predictable()
    few = min(observations.with_canary.size, observations.without_canary.size)
    # (eps, delta)-DP is told apart in the tails, so that the place of the threshold matters
    tails = isinstance(tradeoff, ApproximateDP | PureDP)
    bands = few < _FEW or (tails and few >= _MANY)
    if bands and (inference is None or isinstance(inference, ClopperPearson)):
        return Simultaneous()
    return HeldOut(0.2 if tails else 0.1)


def _inference(observations: Observations, rule: ThresholdRule) -> Inference:
    if isinstance(rule, Simultaneous):
        return ClopperPearson()
    if isinstance(rule, Predictable) or observations.is_stepped:
        return Betting()
    return JointExact()

"""All methods on the same scores: the paper's, the paper's practice, and ours."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from dpaudit.stats import (
    ApproximateDP,
    Betting,
    Bound,
    ClopperPearson,
    Inference,
    JointExact,
    KatzLog,
    Observations,
    Posterior,
    PureDP,
    SameData,
    Simultaneous,
    ThresholdRule,
    TradeOff,
    lower_bound,
)
from dpaudit.stats._chunks import is_on_disk
from dpaudit.stats._defaults import default_method

__all__ = ["NAMES", "Method", "is_large", "methods"]

NAMES = (
    "f-DP(CP)",
    "f-DP(ZB)",
    "(eps,delta)(CP)",
    "(eps,delta)(ZB)",
    "eps-DP(Katz)",
    "f-DP(joint)",
    "(eps,delta)(joint)",
    "f-DP(betting)",
)

_LARGE = 20_000_000  # scores a side; from here on files are not read into memory
_Recipe: TypeAlias = tuple[str, TradeOff, Inference]


@dataclass(frozen=True)
class Method:
    """A trade-off, an inference and a threshold rule, under the name that the field knows them by."""

    name: str
    tradeoff: TradeOff
    inference: Inference
    rule: ThresholdRule

    def is_one_of(self, names: Collection[str] | None) -> bool:
        """Whether it is asked for; None asks for all."""
        return names is None or self.name.split()[0] in names  # without the remark on delta

    def bound(self, observations: Observations, delta: float, confidence: float) -> Bound:
        """What the method finds. Katz's interval is for pure epsilon-DP only, so for delta = 0."""
        return lower_bound(
            observations,
            delta=0.0 if isinstance(self.inference, KatzLog) else delta,
            confidence=confidence,
            tradeoff=self.tradeoff,
            inference=self.inference,
            threshold=self.rule,
        )


def is_large(observations: Observations) -> bool:
    """Whether the scores had better stay on disk."""
    sides = observations.with_canary, observations.without_canary
    return any(is_on_disk(side) and side.size > _LARGE for side in sides)


def methods(observations: Observations, fixed: ThresholdRule | None, curve: TradeOff) -> list[Method]:
    """The paper's methods and ours with sound threshold rules, then the paper's with its own practice.

    Of scores that stay on disk, those that need no more than counts.
    """
    large = is_large(observations)
    if fixed is not None:
        recipes = [*_papers(curve), *_ours(curve)]
        sound = [Method(*recipe, fixed) for recipe in recipes]
        if not large or observations.is_stepped:
            sound.append(Method("f-DP(betting)", curve, Betting(), fixed))
    else:
        sound = _chosen_on_scores(observations, curve)
    return sound if large else [*sound, *(Method(*recipe, SameData()) for recipe in _papers(curve))]


def _chosen_on_scores(observations: Observations, curve: TradeOff) -> list[Method]:
    """Where no threshold is fixed: the rule that a verdict by this method would use, and bands."""
    bands = Method("f-DP(CP)", curve, ClopperPearson(), Simultaneous())
    if observations.num_steps < 2:
        return [bands]  # nothing to hold out
    large = is_large(observations)
    bets = ("f-DP(betting)", curve, Betting())
    recipes = _ours(curve) if large else [*_papers(curve), *_ours(curve), bets]
    found = [Method(*recipe, default_method(observations, *recipe[1:])[1]) for recipe in recipes]
    return found if large or bands in found else [bands, *found]


def _papers(curve: TradeOff) -> list[_Recipe]:
    return [
        ("f-DP(CP)", curve, ClopperPearson()),
        ("f-DP(ZB)", curve, Posterior()),
        ("(eps,delta)(CP)", ApproximateDP(), ClopperPearson()),
        ("(eps,delta)(ZB)", ApproximateDP(), Posterior()),
        ("eps-DP(Katz) delta=0", PureDP(), KatzLog()),
    ]


def _ours(curve: TradeOff) -> list[_Recipe]:
    return [
        ("f-DP(joint)", curve, JointExact()),
        ("(eps,delta)(joint)", ApproximateDP(), JointExact()),
    ]

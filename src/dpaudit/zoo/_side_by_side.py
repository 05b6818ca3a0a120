"""Every method on the same scores: what each finds, and with how few steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dpaudit.methods import Row, examine
from dpaudit.stats import Fixed, Gaussian, SameData
from dpaudit.stats._bound import plain
from dpaudit.zoo._evidence import Evidence, Scores, looks

__all__ = ["Compared", "side_by_side"]


@dataclass(frozen=True)
class Compared:
    """One method: its epsilon of all steps, whether that is more than claimed, and the steps it needs."""

    name: str
    rule: str
    epsilon: float
    kind: str
    is_violation: bool
    steps_needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "epsilon": plain(self.epsilon)}


def side_by_side(evidence: Evidence, scores: Scores, confidence: float) -> tuple[Compared, ...]:
    """All methods with a rule that does not choose its threshold on the counted scores."""
    found = _at(evidence, scores, evidence.num_steps, confidence)
    open_ones = {name for name, one in found.items() if one.is_violation}
    for num_steps in reversed(looks(evidence.num_steps)):
        if not open_ones or not scores.is_enough(num_steps):
            break
        now = _at(evidence, scores, num_steps, confidence) if num_steps < evidence.num_steps else found
        open_ones = {name for name in open_ones if name in now and now[name].is_violation}
        found |= {name: replace(found[name], steps_needed=num_steps) for name in open_ones}
        if not scores.is_stepped:
            break
    return tuple(found.values())


def _at(evidence: Evidence, scores: Scores, num_steps: int, confidence: float) -> dict[str, Compared]:
    """By name; of several rules the last, which is the one that a verdict by this method would use."""
    claim, threshold = evidence.claim, None if scores.is_stepped else scores.threshold
    examined = examine(
        scores.first(num_steps),
        delta=claim.delta,
        confidence=confidence,
        tradeoff=scores.tradeoff or Gaussian(),
        threshold=threshold.threshold if isinstance(threshold, Fixed) else None,
    )
    sound = [row for row in examined.rows if not isinstance(row.method.rule, SameData)]
    return {row.method.name.split()[0]: _compared(row, claim.epsilon) for row in sound}


def _compared(row: Row, claimed: float) -> Compared:
    bound = row.bound
    return Compared(
        name=row.method.name.split()[0],
        rule=repr(row.method.rule),
        epsilon=bound.epsilon,
        kind=str(bound.kind),
        is_violation=bound.epsilon > claimed,
    )

"""What the scores say: every method's bound and, where there is a claim, the verdict."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.methods._counted import CountedOnce
from dpaudit.methods._methods import Method, is_large, methods
from dpaudit.stats import Bound, ErrorCounts, Gaussian, Observations, PureDP, Result, TradeOff, audit
from dpaudit.stats._bound import plain

__all__ = ["REVERSED", "Examined", "Row", "examine"]

REVERSED = (
    "The scores with the canary are lower than those without it. Are the files swapped, or must the score "
    "be negated (a loss, for example)? A higher score has to mean that the canary was present."
)


@dataclass(frozen=True)
class Row:
    """A method and what it found."""

    method: Method
    bound: Bound
    training_epsilon: float | None  # composed over the steps of the claim, where it is of steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        composed = None if self.training_epsilon is None else plain(self.training_epsilon)
        return {"name": self.method.name, **self.bound.to_dict(), "training_epsilon": composed}


@dataclass(frozen=True)
class Examined:
    """All that is printed of one set of scores."""

    observations: Observations
    delta: float
    confidence: float
    rows: tuple[Row, ...]
    result: Result | None

    @property
    def is_reversed(self) -> bool:
        """Whether the scores clearly point the wrong way, by more than four standard deviations."""
        counts = [row.bound.counts for row in self.rows if isinstance(row.bound.counts, ErrorCounts)]
        return any(
            one.fpr + one.fnr - 1 > 2 / math.sqrt(one.num_absent) + 2 / math.sqrt(one.num_present)
            for one in counts
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        nothing = dict.fromkeys(("verdict", "sentence", "claim", "bound", "power"))
        sides = self.observations.with_canary, self.observations.without_canary
        return {
            **(nothing if self.result is None else self.result.to_dict()),
            "delta": self.delta,
            "confidence": self.confidence,
            "shapes": {"with_canary": list(sides[0].shape), "without_canary": list(sides[1].shape)},
            "notes": [REVERSED] if self.is_reversed else [],
            "methods": [row.to_dict() for row in self.rows],
        }


def examine(
    observations: Observations,
    *,
    delta: float,
    confidence: float,
    claim: Claim | None = None,
    tradeoff: TradeOff | None = None,
    of_steps: bool = False,
    threshold: float | None = None,
    names: Collection[str] | None = None,
    result: Result | None = None,
) -> Examined:
    """Run every method, or those of these names, and the audit if there is a claim and no ``result`` yet.

    ``tradeoff`` is the curve of one observation where that is not the claim's own; ``of_steps`` says that
    observations are of single steps of the claimed training, to which bounds are composed.
    """
    if not is_large(observations):
        observations = observations.in_memory()
    fixed = _fixed(observations, threshold)
    found = [m for m in methods(observations, fixed, tradeoff or Gaussian()) if m.is_one_of(names)]
    bounds = [method.bound(observations, delta, confidence) for method in found]
    steps = claim if of_steps else None
    rows = tuple(Row(m, b, _composed(m, b, steps)) for m, b in zip(found, bounds, strict=True))
    if result is None and claim is not None:
        result = audit(observations, claim=claim, confidence=confidence, tradeoff=tradeoff, threshold=fixed)
    return Examined(observations, delta, confidence, rows, result)


def _fixed(observations: Observations, threshold: float | None) -> CountedOnce | None:
    """The threshold that was chosen before the data, if one was; counted once for all methods."""
    if threshold is not None:
        return CountedOnce.of(observations, threshold)
    return CountedOnce.of(observations, 0.5) if observations.normalized else None


def _composed(method: Method, bound: Bound, claim: Claim | None) -> float | None:
    """The bound's epsilon for the whole training; delta = 0 has none."""
    if claim is None or isinstance(method.tradeoff, PureDP):
        return None
    return claim.hypothesis(method.tradeoff).epsilon(bound.parameter)

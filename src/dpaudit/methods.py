"""Comparison of all methods on the same scores, as reported by ``dpaudit scores`` and ``dpaudit run``.

The registry contains the paper's methods and ours. :func:`examine` runs all of them with sound threshold
rules, and the paper's also with its own choice of threshold. It audits the claim, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.stats import (
    ONE_RUN,
    STEP,
    ApproximateDP,
    Betting,
    Bound,
    ClopperPearson,
    ErrorCounts,
    Fixed,
    Gaussian,
    Inference,
    JointExact,
    KatzLog,
    Kind,
    Observations,
    Posterior,
    PureDP,
    Result,
    SameData,
    Simultaneous,
    ThresholdRule,
    TradeOff,
    audit_recorded,
    default_method,
    guesses_of,
    is_on_disk,
    lower_bound,
    one_run_bound,
    plain,
    scale_notes,
)

__all__ = ["NAMES", "REVERSED", "Method", "MethodComparison", "NamedBound", "examine", "is_large", "methods"]


@dataclass(frozen=True)
class Method:
    """A trade-off, an inference and a threshold rule under their common name."""

    name: str
    inference: Inference
    tradeoff: TradeOff | None = None  # that of one observation
    rule: ThresholdRule | None = None  # the default one

    def completed(self, observations: Observations, curve: TradeOff, rule: ThresholdRule | None) -> Method:
        """Return this method with the curve and the rule that it lacks."""
        tradeoff = self.tradeoff or curve
        rule = rule or default_method(observations, tradeoff, self.inference)[1]
        return replace(self, tradeoff=tradeoff, rule=rule)

    def bound(self, observations: Observations, delta: float, confidence: float) -> Bound:
        """Return the bound of this method; KatzLog, which requires pure epsilon-DP, uses delta = 0."""
        assert self.tradeoff is not None
        return lower_bound(
            observations,
            delta=0.0 if isinstance(self.inference, KatzLog) else delta,
            confidence=confidence,
            tradeoff=self.tradeoff,
            inference=self.inference,
            threshold=self.rule,
        )


_PAPERS = (
    Method("f-DP(CP)", ClopperPearson()),
    Method("f-DP(ZB)", Posterior()),
    Method("(eps,delta)(CP)", ClopperPearson(), ApproximateDP()),
    Method("(eps,delta)(ZB)", Posterior(), ApproximateDP()),
    Method("eps-DP(Katz) delta=0", KatzLog(), PureDP()),
)
_OURS = (
    Method("f-DP(joint)", JointExact()),
    Method("(eps,delta)(joint)", JointExact(), ApproximateDP()),
)
_BETS = Method("f-DP(betting)", Betting())
# need only error counts; names are without the remark on delta
COUNT_METHODS = {method.name.split()[0]: (method.tradeoff, method.inference) for method in (*_PAPERS, *_OURS)}
NAMES = (*COUNT_METHODS, _BETS.name)
_STREAMED = 1 << 18  # scores per side above which files stay on disk if the threshold is fixed
_LARGE = 2_000_000  # the same if the threshold is chosen on scores, which mostly needs all of them


def is_large(observations: Observations, *, is_fixed: bool = False) -> bool:
    """Return whether the scores should stay on disk: at a fixed threshold, most methods stream them."""
    sides = observations.with_canary, observations.without_canary
    most = _STREAMED if is_fixed or observations.normalized else _LARGE
    return any(is_on_disk(side) and side.size > most for side in sides)


def methods(
    observations: Observations, fixed: ThresholdRule | None, curve: TradeOff, betting: Betting
) -> list[Method]:
    """Return all methods with sound threshold rules, then the paper's with its own choice of threshold.

    For scores that stay on disk, return only the methods that need nothing but counts; for coupled ones, only
    bets. Without a fixed threshold, rules are those of verdicts by default, and bands.
    """
    bets = replace(_BETS, inference=betting)
    if observations.coupled and observations.is_stepped:
        return [bets.completed(observations, curve, fixed)]
    large = is_large(observations, is_fixed=fixed is not None)
    chosen: tuple[Method, ...] = (*_PAPERS, *_OURS, bets)
    if large and not observations.is_stepped:
        chosen = (*_PAPERS, *_OURS)
    if large and fixed is None:
        chosen = _OURS
    if fixed is None and observations.num_steps < 2:
        chosen = ()  # nothing to hold out
    sound = [method.completed(observations, curve, fixed) for method in chosen]
    bands = Method("f-DP(CP)", ClopperPearson(), curve, Simultaneous())
    if fixed is None and bands not in sound and not (large and sound):
        sound.insert(0, bands)
    practice = [method.completed(observations, curve, SameData()) for method in _PAPERS]
    return sound if large else [*sound, *practice]


REVERSED = (
    "The scores with the canary are lower than those without it, but a higher score must mean that the "
    "canary was present. Check whether the files are swapped or the score (such as a loss) must be negated."
)


@dataclass(frozen=True)
class NamedBound:
    """A method and its bound."""

    name: str
    bound: Bound
    training_epsilon: float | None  # composed over the claimed steps, if observations cover single steps

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        composed = None if self.training_epsilon is None else plain(self.training_epsilon)
        return {"name": self.name, **self.bound.to_dict(), "training_epsilon": composed}


@dataclass(frozen=True)
class MethodComparison:
    """The bounds of all methods, and the verdict if there is a claim, for one set of scores."""

    observations: Observations
    delta: float
    confidence: float
    rows: tuple[NamedBound, ...]
    result: Result | None

    @property
    def is_reversed(self) -> bool:
        """Whether the scores are reversed, by more than four standard deviations."""
        counts = [row.bound.counts for row in self.rows if isinstance(row.bound.counts, ErrorCounts)]
        return any(
            errors.fpr + errors.fnr - 1 > 2 / math.sqrt(errors.num_absent) + 2 / math.sqrt(errors.num_present)
            for errors in counts
        )

    @property
    def default(self) -> Bound | None:
        """The bound of the method that verdicts use by default, else the first sound one, None without any.

        It follows from the shape of the scores, never from the bounds.
        """
        name = _BETS.name if self.observations.is_stepped else _OURS[0].name
        sound = [row for row in self.rows if row.bound.kind is Kind.CONFIDENCE]
        return next((row.bound for row in (*(r for r in sound if r.name == name), *sound)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        nothing = dict.fromkeys(("verdict", "sentence", "p_value", "claim", "bound", "power", "estimate"))
        sides = self.observations.with_canary, self.observations.without_canary
        notes = scale_notes(self.observations) if self.result is None else self.result.notes
        return {
            **(nothing if self.result is None else self.result.to_dict()),
            "scores_of": self.observations.scores_of,
            "delta": self.delta,
            "confidence": self.confidence,
            "shapes": {"with_canary": list(sides[0].shape), "without_canary": list(sides[1].shape)},
            "notes": [REVERSED] if self.is_reversed else list(notes),
            "methods": [row.to_dict() for row in self.rows],
        }


def examine(
    observations: Observations,
    *,
    delta: float,
    confidence: float,
    claim: Claim | None = None,
    tradeoff: TradeOff | None = None,
    threshold: float | None = None,
    names: Collection[str] | None = None,
    result: Result | None = None,
) -> MethodComparison:
    """Run the methods in ``names``, by default all, and the audit if there is a claim but no ``result`` yet.

    ``tradeoff`` is the curve of one observation if it is not the claim's own. Bounds on scores of steps are
    composed over the claimed training run.
    """
    if claim is not None:
        tradeoff = claim.curve_of_scores(observations.scores_of, tradeoff)
    if observations.scores_of == ONE_RUN:
        return _examine_guesses(observations, claim, threshold, delta, confidence)
    large = is_large(observations, is_fixed=threshold is not None)
    if not large:
        observations = observations.in_memory()
    chosen = None if threshold is None else Fixed(threshold)
    fixed = chosen or (Fixed(0.5) if observations.normalized else None)  # before seeing the data
    if result is None and claim is not None:
        # far scores of a large file would need another pass
        bets = Betting(tails=0.0) if large and observations.is_stepped else None
        result = audit_recorded(
            observations,
            claim=claim,
            confidence=confidence,
            tradeoff=tradeoff,
            inference=bets,
            threshold=chosen,
        )
    betting = _betting(claim, tradeoff, result)
    candidates = methods(observations, fixed, tradeoff or Gaussian(), betting)
    selected = [method for method in candidates if names is None or method.name.split()[0] in names]
    bounds = [method.bound(observations, delta, confidence) for method in selected]
    steps = claim if observations.scores_of == STEP else None
    rows = tuple(NamedBound(m.name, b, _composed(m, b, steps)) for m, b in zip(selected, bounds, strict=True))
    return MethodComparison(observations, delta, confidence, rows, result)


def _examine_guesses(
    observations: Observations, claim: Claim | None, threshold: float | None, delta: float, confidence: float
) -> MethodComparison:
    """Run the methods that hold for canaries of the same run."""
    observations = observations.in_memory()
    universal = one_run_bound(guesses_of(observations, threshold), delta=delta, confidence=confidence)
    rows, result = [NamedBound("(eps,delta)(one-run)", universal, None)], None
    if claim is not None:
        rule = None if threshold is None else Fixed(threshold)
        result = audit_recorded(observations, claim=claim, confidence=confidence, threshold=rule)
        rows.insert(0, NamedBound("f-DP(one-run)", result.bound, None))
    return MethodComparison(observations, delta, confidence, tuple(rows), result)


def _betting(claim: Claim | None, tradeoff: TradeOff | None, result: Result | None) -> Betting:
    """Return the verdict's own bets, otherwise bets that are tuned for the claim."""
    if result is not None and isinstance(result.bound.inference, Betting):
        return result.bound.inference
    return Betting() if claim is None else Betting(expected=claim.hypothesis(tradeoff).parameter)


def _composed(method: Method, bound: Bound, claim: Claim | None) -> float | None:
    """Return the bound's epsilon for the whole training run; None for delta = 0."""
    if claim is None or claim.training is None or isinstance(method.tradeoff, PureDP):
        return None
    return claim.hypothesis(method.tradeoff).epsilon(bound.parameter)

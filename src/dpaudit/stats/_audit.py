"""From scores and a claim to a verdict."""

from __future__ import annotations

from dataclasses import replace

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._bound import Bound
from dpaudit.stats._claim import Claimed
from dpaudit.stats._defaults import default_method
from dpaudit.stats._design import Design
from dpaudit.stats._lower_bound import lower_bound, require
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Kind, Question
from dpaudit.stats._result import Result
from dpaudit.stats._verdict import Verdict
from dpaudit.stats.inference import Betting, ExactInference, Inference
from dpaudit.stats.thresholds import ThresholdRule
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["audit"]


def audit(
    observations: Observations,
    *,
    claim: Claimed,
    confidence: float = 0.95,
    tradeoff: TradeOff | None = None,
    inference: Inference | None = None,
    threshold: ThresholdRule | None = None,
) -> Result:
    """Test the claim on the observations.

    Without ``inference`` and ``threshold`` a sound pair is chosen from the shape of the observations,
    not from their values. ``tradeoff`` is the curve to test; by default the claim's own.
    """
    _require_kinds(observations, claim, tradeoff, inference, threshold)
    confidence = _validate.confidence(confidence)
    hypothesis = claim.hypothesis(tradeoff)
    method, rule = default_method(observations, hypothesis.tradeoff, inference, threshold)
    _require_confidence(method, rule)
    bound = lower_bound(
        observations,
        delta=claim.delta,
        confidence=confidence,
        tradeoff=hypothesis.tradeoff,
        inference=method,
        threshold=rule,
    )
    question = Question(hypothesis.tradeoff, claim.delta, 1 - confidence)
    design = Design.of(observations, method, rule, question)
    return Result(
        claim=claim,
        bound=replace(
            bound,
            epsilon=hypothesis.epsilon(bound.parameter),
            assumptions=(*bound.assumptions, *hypothesis.assumptions),
        ),
        verdict=_verdict(bound, hypothesis.parameter, design),
        hypothesis=hypothesis,
        design=design,
    )


def _require_kinds(
    observations: object, claim: object, tradeoff: object, inference: object, threshold: object
) -> None:
    if not isinstance(observations, Observations):
        raise InputError(
            f"Expected observations to be Observations(...), got a {type(observations).__name__}."
        )
    if not isinstance(claim, Claimed):
        raise InputError(f"Expected claim to be such as Claim.gaussian(...), got {claim!r}.")
    for value, kind, name, example in (
        (tradeoff, TradeOff, "tradeoff", "Gaussian()"),
        (inference, Inference, "inference", "JointExact()"),
        (threshold, ThresholdRule, "threshold", "Fixed(0.5)"),
    ):
        if value is not None:
            require(value, kind, name, example)


def _verdict(bound: Bound, claimed: float, design: Design) -> Verdict:
    if bound.parameter > claimed:
        return Verdict.VIOLATION
    if design.perfect() <= claimed:
        return Verdict.UNDERPOWERED
    return Verdict.NO_VIOLATION


def _require_confidence(inference: Inference, rule: ThresholdRule) -> None:
    if not rule.valid:
        raise InputError(
            f"A verdict cannot rest on {rule!r}, which chooses the threshold on the counted data; "
            "use lower_bound() for the number, or HeldOut() for a verdict."
        )
    if inference.kind is not Kind.CONFIDENCE:
        raise InputError(
            f"A verdict cannot rest on {inference!r}, which gives a {inference.kind} bound; "
            "use lower_bound() for the number, or JointExact() for a verdict."
        )
    if not isinstance(inference, ExactInference | Betting):
        raise InputError(
            f"A verdict states its power, which {inference!r} does not know: expected an ExactInference, "
            "which says what it refutes, or Betting()."
        )

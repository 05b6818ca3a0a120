"""The verdict on a claim, given scores (:func:`audit`), or only a bound (:func:`lower_bound`).

If no method is given, a sound one is chosen from the claim and the shape of the observations, never from the
scores. The simulations behind that choice are in docs/soundness.md, "How the defaults were chosen".
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._bound import Bound
from dpaudit.stats._counts import ErrorCounts, Guesses
from dpaudit.stats._estimate import scale_notes
from dpaudit.stats._observations import (
    ALIKE,
    ONE_RUN,
    SCORES_OF,
    STEP,
    Observations,
    require_higher_is_present,
)
from dpaudit.stats._one_run import GuessDesign, guessed_p_value, one_run_fdp_bound
from dpaudit.stats._power import AuditDesign
from dpaudit.stats._result import Claimed, Result
from dpaudit.stats._serialization import NamedPart
from dpaudit.stats.inference import (
    Betting,
    BoundQuery,
    CountInference,
    ExactInference,
    Inference,
    JointExact,
    Kind,
    RankInference,
    ThresholdResult,
)
from dpaudit.stats.thresholds import (
    BestOf,
    Fixed,
    HeldOut,
    Optimal,
    Predictable,
    Simultaneous,
    Tails,
    ThresholdRule,
)
from dpaudit.stats.tradeoffs import ApproximateDP, PureDP, TradeOff

# assumptions, which docs/verdicts.md explains
_GIVEN_COUNTS = "the threshold for the counts was chosen before seeing the data"
_ONLY_SCORES = "how the scores were produced"
_MOST_GUESSES = 100_000  # the bound on them takes a minute


@_validate.reject_epsilon("claim=..., such as Claim.approximate_dp(epsilon=..., delta=...)")
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

    Args:
        observations: The scores. For a claim about DP-SGD, they state ``scores_of``.
        claim: What is claimed, such as :meth:`dpaudit.Claim.dpsgd`.
        confidence: At most 1 - confidence of correct mechanisms are a violation.
        tradeoff: The curve to test, by default that of the claim.
        inference: How a bound follows from errors; by default, with ``threshold``, a sound pair that is
            chosen from the shape of the observations, not from their values.
        threshold: From which score on a canary counts as present.

    Returns:
        The verdict, the bound and the power.

    Raises:
        InputError: An argument is invalid, or scores are certainly lower with the canary than without it.

    >>> rng = np.random.default_rng(0)
    >>> scores = Observations(with_canary=rng.normal(2, 1, 500), without_canary=rng.normal(0, 1, 500))
    >>> from dpaudit import Claim
    >>> print(audit(scores, claim=Claim.gaussian(noise_multiplier=1.0, delta=1e-5)).verdict.name)
    VIOLATION

    """
    _require_kinds(observations, claim, tradeoff, inference, threshold)
    require_higher_is_present(observations, "negate them, as in Observations(with_canary=-scores, ...)")
    return audit_recorded(
        observations,
        claim=claim,
        confidence=confidence,
        tradeoff=tradeoff,
        inference=inference,
        threshold=threshold,
    )


def audit_recorded(
    observations: Observations,
    *,
    claim: Claimed,
    confidence: float = 0.95,
    tradeoff: TradeOff | None = None,
    inference: Inference | None = None,
    threshold: ThresholdRule | None = None,
) -> Result:
    """Test the claim on scores that are not lower with the canary, such as those of a recorder."""
    _require_kinds(observations, claim, tradeoff, inference, threshold)
    tradeoff = claim.curve_of_scores(observations.scores_of, tradeoff)
    if observations.scores_of == ONE_RUN:
        if inference is not None or not isinstance(threshold, Fixed | None):
            raise InputError(
                f"scores_of={ONE_RUN!r} allows no inference, and no threshold rule but Fixed(...): all "
                "canaries of the run are guessed."
            )
        return _audit_guesses(observations, claim, tradeoff, confidence, threshold)
    hypothesis = claim.hypothesis(tradeoff)
    method, rule = default_method(observations, hypothesis.tradeoff, inference, threshold)
    if isinstance(method, Betting) and method.expected is None:
        method = replace(method, expected=hypothesis.parameter)  # known before the data
    result = audit_untuned(
        observations,
        claim=claim,
        confidence=confidence,
        tradeoff=tradeoff,
        inference=method,
        threshold=rule,
    )
    if observations.scores_of != STEP:  # the curve of a whole run is among the assumptions
        return result
    assumptions = (*result.bound.assumptions, SCORES_OF[STEP])
    return replace(result, bound=replace(result.bound, assumptions=assumptions))


def _audit_guesses(
    observations: Observations,
    claim: Claimed,
    tradeoff: TradeOff | None,
    confidence: float,
    threshold: Fixed | None,
) -> Result:
    """Test the claim by guesses on all canaries of one run, whose scores may be dependent."""
    hypothesis = claim.hypothesis(tradeoff)
    guesses = guesses_of(observations, None if threshold is None else threshold.threshold)
    bound = one_run_fdp_bound(guesses, tradeoff=hypothesis.tradeoff, delta=claim.delta, confidence=confidence)
    assumptions = (*bound.assumptions, SCORES_OF[ONE_RUN])
    return Result(
        claim=claim,
        bound=replace(bound, epsilon=hypothesis.epsilon(bound.parameter), assumptions=assumptions),
        hypothesis=hypothesis,
        design=GuessDesign(guesses, hypothesis.tradeoff, claim.delta, 1 - confidence),
        bound_p_value=partial(guessed_p_value, guesses, hypothesis.tradeoff),
        notes=scale_notes(observations),
        observations=observations,
        diagnosis=claim.diagnosed(),
        no_estimate=(
            "The scores of one run may be dependent, which an estimate of the noise does not account for."
        ),
        not_covered=(_ONLY_SCORES,),
    )


def guesses_of(observations: Observations, threshold: float | None) -> Guesses:
    """Return guesses on all scores: above the threshold, 1/2 for normalized ones, else the higher half."""
    sides = observations.with_canary, observations.without_canary
    scores = np.concatenate(sides)
    if scores.size > _MOST_GUESSES:
        raise InputError(
            f"One run may have at most {_MOST_GUESSES:,} scores, got {scores.size:,}; choose some of the "
            "canaries at random."
        )
    present = np.repeat([True, False], [side.size for side in sides])
    if threshold is None and observations.normalized:
        threshold = 0.5
    if threshold is None:
        return Guesses.from_scores(scores, present, num_guesses=scores.size)
    return Guesses.at_threshold(scores, present, threshold=threshold)


def audit_untuned(
    observations: Observations,
    *,
    claim: Claimed,
    confidence: float,
    tradeoff: TradeOff | None,
    inference: Inference,
    threshold: ThresholdRule | None = None,
) -> Result:
    """Test the claim by this inference as it is: bets that were already placed cannot be tuned any more."""
    _require_kinds(observations, claim, tradeoff, inference, threshold)
    confidence = _validate.confidence(confidence)
    hypothesis = claim.hypothesis(tradeoff)
    method, rule = default_method(observations, hypothesis.tradeoff, inference, threshold)
    method = _suited(method, observations)
    _require_confidence(method, rule)
    query = BoundQuery(hypothesis.tradeoff.at(claim.delta), claim.delta, 1 - confidence)
    bound, finding = _evaluated(observations, rule, method, query)
    return Result(
        claim=claim,
        bound=replace(
            bound,
            epsilon=hypothesis.epsilon(bound.parameter),
            assumptions=(*bound.assumptions, *hypothesis.assumptions),
        ),
        hypothesis=hypothesis,
        design=AuditDesign.of(observations, method, rule, query),
        bound_p_value=finding.p_value,
        # a canary that is sampled scores its sample rate on average
        notes=scale_notes(observations, getattr(hypothesis.tradeoff, "sample_rate", 1.0)),
        observations=observations,
        diagnosis=claim.diagnosed(),
        not_covered=(_ONLY_SCORES,),
    )


def lower_bound(
    observations: Observations | ErrorCounts,
    *,
    delta: float,
    tradeoff: TradeOff,
    inference: Inference,
    threshold: ThresholdRule | None = None,
    confidence: float = 0.95,
) -> Bound:
    """Return the largest refuted parameter of a trade-off, and its epsilon at ``delta``.

    Args:
        observations: Scores, or error counts at a threshold that was chosen before seeing the data.
        delta: The delta of the epsilon.
        tradeoff: The family of curves.
        inference: How the bound follows from errors.
        threshold: The threshold rule, for scores only.
        confidence: The confidence of the bound, unless its kind is weaker.

    Returns:
        The bound, with its kind and its assumptions.

    Raises:
        InputError: An argument is invalid, or counts have a threshold rule.

    >>> from dpaudit import ClopperPearson, Gaussian
    >>> counts = ErrorCounts(
    ...     false_positives=160, num_absent=1000, false_negatives=150, num_present=1000)
    >>> bound = lower_bound(counts, delta=1e-5, tradeoff=Gaussian(), inference=ClopperPearson())
    >>> print(bound.statement)
    mu >= 1.839, epsilon >= 9.021 at delta = 1e-05, with 95 % confidence

    """
    delta, confidence = _validate.delta(delta), _validate.confidence(confidence)
    _validate.instance("tradeoff", tradeoff, TradeOff, "a trade-off such as Gaussian()")
    _validate.instance("inference", inference, Inference, "an inference such as ClopperPearson()")
    query = BoundQuery(tradeoff.at(delta), delta, 1 - confidence)
    if isinstance(observations, ErrorCounts):
        if threshold is not None:
            raise InputError(f"Error counts need no threshold rule, got {threshold!r}.")
        if not isinstance(inference, CountInference):
            raise InputError(f"{inference!r} needs scores, got counts.")
    else:
        _validate.instance("observations", observations, Observations, "Observations(...)")
        _validate.instance("threshold", threshold, ThresholdRule, "a threshold rule such as Fixed(0.5)")
        inference = _suited(inference, observations)
    return _evaluated(observations, threshold, inference, query)[0]


def _evaluated(
    observations: Observations | ErrorCounts,
    threshold: ThresholdRule | None,
    inference: Inference,
    query: BoundQuery,
) -> tuple[Bound, ThresholdResult]:
    """Apply the method; return the bound with its assumptions, and the result behind it."""
    if isinstance(observations, Observations):
        assert threshold is not None
        finding, design = threshold.apply(observations, inference, query), observations.design
    else:
        assert isinstance(inference, CountInference)
        finding = ThresholdResult(inference.parameter(observations, query), None, observations)
        design = ALIKE
    is_fixed = isinstance(threshold, Fixed | Optimal | None)
    assumptions = [
        query.tradeoff.assumption(query.delta),
        inference.assumption(observations, is_fixed=is_fixed),
        design,
        _GIVEN_COUNTS if threshold is None else threshold.assumption,
    ]
    rule = finding.rule if isinstance(finding.rule, ThresholdRule) else threshold
    bound = Bound(
        epsilon=query.tradeoff.epsilon(finding.parameter, query.delta),
        delta=query.delta,
        confidence=1 - query.error_rate,
        parameter=finding.parameter,
        tradeoff=query.tradeoff,
        inference=inference,
        threshold_rule=NamedPart("given counts") if rule is None else rule,
        threshold=finding.threshold,
        counts=finding.counts,
        kind=inference.kind if threshold is None or threshold.valid else Kind.HEURISTIC,
        assumptions=tuple(text for text in assumptions if text),
    )
    return bound, finding


def _suited(inference: Inference, observations: Observations) -> Inference:
    """Return the inference without what coupled scores do not allow; reject counts of them.

    Coupled scores depend on which other canaries were present: their errors vary more than a binomial, so no
    count would hold, and a guess may know the presences that a stop-loss assumes unknown.
    """
    if not observations.coupled or not observations.is_stepped:
        return inference
    if isinstance(inference, Betting):
        return replace(inference, stop_loss=False)
    raise InputError(
        "inference must be Betting() for scores that depend on which other canaries were present, as those "
        f"of input canaries do; {inference!r} assumes that they are independent."
    )


def default_method(
    observations: Observations,
    tradeoff: TradeOff,
    inference: Inference | None = None,
    rule: ThresholdRule | None = None,
) -> tuple[Inference, ThresholdRule]:
    """Fill in the missing parts without reading the scores: a choice based on them would be unsound."""
    rule = rule or _rule(observations, tradeoff, inference)
    return inference or _inference(observations, rule), rule


def _rule(observations: Observations, tradeoff: TradeOff, inference: Inference | None) -> ThresholdRule:
    few = min(observations.with_canary.size, observations.without_canary.size)
    if observations.normalized:
        return fixed_rule(few, is_stepped=observations.is_stepped, inference=inference)
    if isinstance(inference, Betting) or (inference is None and observations.is_stepped):
        return Predictable()
    # violations of (eps, delta)-DP appear in the tails, so the position of the threshold matters
    tails = isinstance(tradeoff, ApproximateDP | PureDP)
    # below 10, a held-out part is too small to choose on; from 50 on, bands beat one where tails matter
    bands = few < 10 or (tails and few >= 50)
    if bands and isinstance(inference, RankInference | None):
        return Simultaneous()
    return HeldOut(0.2 if tails else 0.1)


def fixed_rule(size: int, *, is_stepped: bool, inference: Inference | None) -> ThresholdRule:
    """Return the midpoint; the tails of ``size`` one-dimensional scores per side get a tenth of the error."""
    # fewer scores show too little of their tails to spend error on them
    if is_stepped or size < 100 or not isinstance(inference, RankInference | None):
        return Fixed(0.5)
    return BestOf((Fixed(0.5), Tails()), (0.9, 0.1))


def _inference(observations: Observations, rule: ThresholdRule) -> Inference:
    rules = rule.known_rules if isinstance(rule, BestOf) else [rule]
    counted = any(isinstance(rule, Simultaneous | Tails) for rule in rules)  # of all scores, not of steps
    bet = any(isinstance(rule, Predictable) for rule in rules)
    return Betting() if bet or (observations.is_stepped and not counted) else JointExact()


def _require_kinds(
    observations: object, claim: object, tradeoff: object, inference: object, threshold: object
) -> None:
    _validate.instance("observations", observations, Observations, "Observations(...)")
    _validate.instance("claim", claim, Claimed, "a Claim such as Claim.gaussian(...)")
    for value, kind, name, example in (
        (tradeoff, TradeOff, "tradeoff", "a trade-off such as Gaussian()"),
        (inference, Inference, "inference", "an inference such as JointExact()"),
        (threshold, ThresholdRule, "threshold", "a threshold rule such as Fixed(0.5)"),
    ):
        if value is not None:
            _validate.instance(name, value, kind, example)


def _require_confidence(inference: Inference, rule: ThresholdRule) -> None:
    if not rule.valid:
        raise InputError(
            f"A verdict cannot rest on {rule!r}, which chooses the threshold on the counted data: "
            "use lower_bound() for the number alone, or HeldOut() for a verdict."
        )
    if inference.kind is not Kind.CONFIDENCE:
        raise InputError(
            f"A verdict cannot rest on {inference!r}, which gives a {inference.kind} bound: "
            "use lower_bound() for the number alone, or JointExact() for a verdict."
        )
    if not isinstance(inference, ExactInference | Betting):
        raise InputError(
            "inference must be an ExactInference or Betting(), whose power can be computed, got "
            f"{inference!r}."
        )

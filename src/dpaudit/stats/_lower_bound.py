"""From scores to a bound: the verb of this package."""

from __future__ import annotations

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._bound import Bound
from dpaudit.stats._coins import FAIR
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Kind, Question
from dpaudit.stats.inference import CountInference, Inference
from dpaudit.stats.thresholds import SameData, ThresholdRule
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["lower_bound", "require"]

_ALIKE = "what was seen with and without the canary differs in the canary alone"
_GIVEN = "the threshold behind the counts was chosen before the data"
_SAME_DATA = "nothing is known of the error rate: the threshold was chosen on the counted data"


def lower_bound(
    observations: Observations | ErrorCounts,
    *,
    delta: float,
    tradeoff: TradeOff,
    inference: Inference,
    threshold: ThresholdRule | None = None,
    confidence: float = 0.95,
) -> Bound:
    """The largest parameter of ``tradeoff`` that the observations refute, and its epsilon at ``delta``.

    Give scores and a threshold rule, or counts at a threshold that was chosen before the data.

    >>> from dpaudit import ClopperPearson, Gaussian
    >>> counts = ErrorCounts(
    ...     false_positives=160, num_absent=1000, false_negatives=150, num_present=1000)
    >>> bound = lower_bound(counts, delta=1e-5, tradeoff=Gaussian(), inference=ClopperPearson())
    >>> print(bound.statement)
    mu >= 1.839, epsilon >= 9.021 at delta = 1e-05, with 95 % confidence
    """
    delta, confidence = _validate.delta(delta), _validate.confidence(confidence)
    require(tradeoff, TradeOff, "tradeoff", "Gaussian()")
    require(inference, Inference, "inference", "ClopperPearson()")
    question = Question(tradeoff.at(delta), delta, 1 - confidence)
    inference.check(question)
    finding = _find(observations, threshold, inference, question)
    valid = threshold is None or threshold.valid
    return Bound(
        epsilon=question.tradeoff.epsilon(finding.parameter, delta),
        delta=delta,
        confidence=confidence,
        parameter=finding.parameter,
        tradeoff=question.tradeoff,
        method=repr(inference),
        rule="given counts" if threshold is None else repr(threshold),
        threshold=finding.threshold,
        counts=finding.counts,
        kind=inference.kind if valid else Kind.HEURISTIC,
        assumptions=_assumptions(observations, threshold, inference, question),
    )


def require(value: object, kind: type, name: str, example: str) -> None:
    """Refuse what is not an object of this kind, such as a class or a bare number."""
    if not isinstance(value, kind):
        raise InputError(f"Expected {name} to be an object such as {example}, got {value!r}.")


def _find(
    observations: Observations | ErrorCounts,
    threshold: ThresholdRule | None,
    inference: Inference,
    question: Question,
) -> Finding:
    if isinstance(observations, ErrorCounts):
        if threshold is not None:
            raise InputError(f"Expected no threshold with given counts, got {threshold!r}.")
        if not isinstance(inference, CountInference):
            raise InputError(f"{inference!r} needs scores, got counts.")
        return Finding(inference.parameter(observations, question), None, observations)
    require(observations, Observations, "observations", "Observations(with_canary=..., ...)")
    require(threshold, ThresholdRule, "threshold", "Fixed(0.5)")
    assert threshold is not None
    return threshold.apply(observations, inference, question)


def _assumptions(
    observations: Observations | ErrorCounts,
    threshold: ThresholdRule | None,
    inference: Inference,
    question: Question,
) -> tuple[str, ...]:
    stepped = isinstance(observations, Observations) and observations.is_stepped
    texts = [question.tradeoff.assumption(question.delta), inference.assumption(stepped)]
    texts.append(FAIR if isinstance(observations, Observations) and observations.by_coin else _ALIKE)
    if threshold is None:
        texts.append(_GIVEN)
    if isinstance(threshold, SameData):
        texts.append(_SAME_DATA)
    return tuple(text for text in texts if text)

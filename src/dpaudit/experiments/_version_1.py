"""Numbers of version 0.1, which had no seals: derived again by the methods that a result names.

Its bets and its joint test were others, and so were the guesses of an end-to-end audit: a remark names the
first number that this version computes differently. Everything else must follow from the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dpaudit._provenance import digest
from dpaudit.errors import InputError, quoted
from dpaudit.experiments._derivation import (
    Difference,
    claimed_version,
    naming,
    read_scores,
    refuse,
    stored_diagnosis,
    unequal,
)
from dpaudit.experiments._run_analysis import StoredScores
from dpaudit.stats import (
    ApproximateDP,
    Betting,
    Bound,
    Guesses,
    Inference,
    JointExact,
    ThresholdRule,
    TradeOff,
    Verdict,
    lower_bound,
    one_run_bound,
    one_run_fdp_bound,
)
from dpaudit.stats._audit import audit_untuned
from dpaudit.stats._bound import plain
from dpaudit.stats._one_run import too_many_correct

VERSION_1: Final = "0.1."
"""How the name of a version without seals begins."""
_MOST_KNOWN = 1024  # bounds that are kept in memory
_KNOWN: dict[str, Mapping[str, Any]] = {}
_NO_SCORES = "Its numbers could not be derived again: its scores are missing."


def derive_version_1(folder: Path, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare a result with what follows from the scores; return remarks, raise if it contradicts them."""
    with naming(folder):
        scores = read_scores(folder, values, is_required=False)
        if scores is None:
            return (_NO_SCORES,)
        differences = list(_differences(values, scores))
    wrong = next((one for one in differences if not one.is_known), None)
    refuse(folder, values, wrong)
    writer = claimed_version(folder, values)
    return _remarks(differences, "another version" if writer is None else f"version {writer}")


def _remarks(differences: list[Difference], writer: str) -> tuple[str, ...]:
    """Return a sentence on numbers that this version derives differently."""
    if not differences:
        return ()
    shown = [one for one in differences if one.key == "verdict"] + differences
    first, count = shown[0], len(differences) - 1
    more = f", and {count} more {'number' if count == 1 else 'numbers'} differ" if count else ""
    return (
        f"Its bounds were computed by {writer} of dpaudit; this version derives {first.key} = "
        f"{quoted(first.derived)} instead of {quoted(first.stored)}{more}.",
    )


def _differences(values: Mapping[str, Any], scores: StoredScores) -> Iterator[Difference]:
    """Yield what differs from bounds by the methods that the result names, and a verdict without reason."""
    bound = Bound.from_dict(values["bound"])
    if scores.claim is not None and isinstance(bound.tradeoff, TradeOff):
        hypothesis = scores.claim.hypothesis(bound.tradeoff)
        claimed = {"epsilon": plain(scores.claim.epsilon), "parameter": plain(hypothesis.parameter)}
        yield from unequal("claim", values["claim"], {**claimed, "delta": values["delta"]})
    derived = _named_bound(scores, bound, is_verdict=True)
    verdict = derived.pop("verdict", None)
    differences = list(_bound_differences("bound", values, values["bound"], derived))
    yield from differences
    for row in values["methods"]:
        found = _named_bound(scores, Bound.from_dict(row))
        found.pop("verdict", None)
        if row.get("training_epsilon") is None:
            found.pop("training_epsilon", None)
        yield from _bound_differences(f"methods.{ascii(row.get('name'))[1:-1]:.40}", values, row, found)
    if (row := values.get("one_run_bound")) is not None:
        looser = _named_bound(scores, Bound.from_dict(row))
        looser.pop("verdict", None)
        for one in unequal("one_run_bound", row, looser):
            yield Difference(one.key, one.stored, one.derived, is_known=True)  # it guessed otherwise
    yield from _verdict_differences(values, verdict, is_known=any(one.is_known for one in differences))


def _bound_differences(
    where: str, values: Mapping[str, Any], stored: Mapping[str, Any], derived: dict[str, Any]
) -> Iterator[Difference]:
    """Yield what differs; bets and the joint test have changed since, but not what they count."""
    bound = Bound.from_dict(stored)
    itself = {"statement": bound.statement, "confidence": values["confidence"]}
    has_changed = isinstance(bound.inference, Betting | JointExact)
    for one in unequal(where, stored, derived):
        is_known = has_changed and one.key.endswith((".parameter", "epsilon"))
        yield Difference(one.key, one.stored, one.derived, is_known=is_known)
    yield from unequal(where, stored, itself)


def _verdict_differences(
    values: Mapping[str, Any], derived: str | None, *, is_known: bool
) -> Iterator[Difference]:
    """Yield the verdict if it is not that of the bound and the tests, and findings without p-values."""
    tests, has_findings = values.get("diagnosis"), False
    if tests is not None:
        known = {str(one["name"]) for one in tests["tests"]}  # other findings need no test
        expected = {one.name for one in stored_diagnosis(tests, float(tests["confidence"])).findings} & known
        found = {str(one["name"]) for one in tests["findings"]} & known
        if expected != found:
            yield Difference("findings", sorted(found), sorted(expected))
        is_joint = values.get("refuted") is not None  # in version 0.1, no verdict rested on tests
        has_findings = is_joint and bool(tests["findings"])
        if not is_joint:
            yield from unequal("diagnosis", tests, {"confidence": values["confidence"]})
    stored = values.get("verdict")
    if stored is not None:
        bound, claimed = Bound.from_dict(values["bound"]), values["claim"]["parameter"]
        is_refuted = has_findings or bound.parameter > (math.inf if claimed == "inf" else claimed)
        if is_refuted is not (stored == Verdict.VIOLATION.name):
            other = Verdict.VIOLATION if is_refuted else Verdict.NO_VIOLATION
            yield Difference("verdict", stored, other.name)
    derived = Verdict.VIOLATION.name if has_findings else derived
    # failed trials are errors that the scores do not show, and what is underpowered has changed
    is_weaker = stored == Verdict.UNDERPOWERED.name and derived == Verdict.NO_VIOLATION.name
    if derived is not None and stored != derived and not is_weaker:
        yield Difference("verdict", stored, derived, is_known=is_known)


def _named_bound(scores: StoredScores, bound: Bound, *, is_verdict: bool = False) -> dict[str, Any]:
    """Return the numbers of a bound by its own method; the latest are kept in memory."""
    parts = [part.to_dict() for part in (bound.tradeoff, bound.inference, bound.threshold_rule)]
    guesses = bound.counts.num_guesses if isinstance(bound.counts, Guesses) else None
    key = digest([scores.digest, parts, bound.delta, bound.confidence, guesses, is_verdict])
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _bound_by_name(scores, bound, is_verdict=is_verdict)
    return dict(_KNOWN[key])


def _bound_by_name(scores: StoredScores, bound: Bound, *, is_verdict: bool) -> dict[str, Any]:
    claim = scores.claim
    if not isinstance(bound.tradeoff, TradeOff):
        raise _unknown(bound.tradeoff)
    if isinstance(bound.counts, Guesses):
        guesses, level = scores.guesses(bound.counts.num_guesses), (bound.delta, bound.confidence)
        if isinstance(bound.tradeoff, ApproximateDP):
            return _numbers(one_run_bound(guesses, delta=level[0], confidence=level[1]))
        curve = bound.tradeoff
        found = one_run_fdp_bound(guesses, tradeoff=curve, delta=level[0], confidence=level[1])
        claimed = math.inf if claim is None else claim.hypothesis(curve).parameter
        best = replace(guesses, num_correct=guesses.num_guesses)
        can_refute = too_many_correct(best, curve, claimed, 1 - found.confidence)
        return _numbers(found) | {"verdict": _verdict_name(found.parameter > claimed, can_refute=can_refute)}
    for part, kind in ((bound.inference, Inference), (bound.threshold_rule, ThresholdRule)):
        if not isinstance(part, kind):
            raise _unknown(part)
    method: dict[str, Any] = {
        "confidence": bound.confidence,
        "tradeoff": bound.tradeoff,
        "inference": bound.inference,
        "threshold": bound.threshold_rule,
    }
    if is_verdict and claim is not None:
        result = audit_untuned(scores.observations, claim=claim, **method)
        can_refute = result.design.can_refute(result.hypothesis.parameter)
        return _numbers(result.bound) | {
            "verdict": _verdict_name(bool(result.refuted), can_refute=can_refute)
        }
    found = lower_bound(scores.observations, delta=bound.delta, **method)
    composed = None
    if claim is not None and bound.delta == scores.values["delta"]:
        composed = plain(claim.hypothesis(bound.tradeoff).epsilon(found.parameter))
    return _numbers(found) | {"training_epsilon": composed}


def _verdict_name(is_refuted: bool, *, can_refute: bool) -> str:
    """Return the verdict; an audit was underpowered if even one without errors could not refute the claim."""
    if is_refuted:
        return Verdict.VIOLATION.name
    return Verdict.NO_VIOLATION.name if can_refute else Verdict.UNDERPOWERED.name


def _unknown(part: object) -> InputError:
    return InputError(f"Expected a method of dpaudit, got {part!s:.80}.")


def _numbers(bound: Bound) -> dict[str, Any]:
    return {
        "counts": bound.counts.to_dict(),
        "threshold": bound.threshold,
        "parameter": plain(bound.parameter),
        "epsilon": plain(bound.epsilon),
        "kind": str(bound.kind),
    }

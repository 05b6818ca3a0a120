"""Counts, bounds and verdict of a stored run, derived again from its scores and compared with its result.

The methods follow from the config: a result cannot choose a confidence, a bound or a method of its own, nor
omit one. What is not derived: power, p-values and sentences of tests, likely causes, accuracy and timing.
Only the seal protects those. A run of version 0.1, whose methods were others, is derived by the methods that
it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import dpaudit
from dpaudit._io import read_json
from dpaudit._provenance import digest, seed_digest
from dpaudit.diagnostics import Check, Diagnosis, Finding
from dpaudit.errors import InputError
from dpaudit.experiments._run_analysis import RETRIED, RunAnalysis, StoredScores, analyze, guessed_verdict
from dpaudit.methods import REVERSED
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
from dpaudit.stats._serialization import SCHEMA_VERSION

VERSION_1: Final = "0.1."
"""How the name of a version without seals begins."""
_RELATIVE, _ABSOLUTE = 1e-6, 1e-8  # other machines and versions of SciPy round differently
_ROUNDED = 1e-3  # relative difference of a number that a sentence rounds
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_UNTESTED = "the noise is not tested"
_MOST_KNOWN = 1024  # bounds that are kept in memory
_KNOWN: dict[str, Mapping[str, Any]] = {}
_NO_SCORES = "Its numbers could not be derived again: its scores are missing."


@dataclass(frozen=True)
class Difference:
    """A stored value, and what follows from the scores instead.

    ``is_known`` states that version 0.1 computed it in another way than this version.
    """

    key: str
    stored: object
    derived: object
    is_known: bool = False


def derive(folder: Path, values: Mapping[str, Any], *, is_version_1: bool) -> tuple[str, ...]:
    """Compare a result with what follows from scores and config; return remarks, raise if it differs.

    Only a run of version 0.1 may lack its scores, or have bounds that this version computes differently: a
    remark then says so.
    """
    path, writer = folder / "result.json", claimed_version(folder, values)
    with _naming(folder):
        if values.get("schema_version") != SCHEMA_VERSION:
            raise InputError(f"Expected schema_version={SCHEMA_VERSION}, got another one.")
        config = _config(folder)
        _require_config(values, config, folder)
        table = config.get("config", {}).get("audit") or values.get("audit") or {}
        scores = StoredScores.read(folder, values, table, is_required=not is_version_1)
        if scores is None:
            return (_NO_SCORES,)
        _require_countable(scores, folder)
        made = _version_1_differences(values, scores) if is_version_1 else _differences(values, scores)
        differences = list(made)
    wrong = next((one for one in differences if not one.is_known), None)
    if wrong is not None:
        raise InputError(
            f"Expected {wrong.key} = {_shown(wrong.derived)} in {path}, as follows from the other files of "
            f"the run, got {_shown(wrong.stored)}: {_reason(writer)}."
        )
    return _remarks(differences, "another version" if writer is None else f"version {writer}")


def _reason(writer: str | None) -> str:
    if writer in (None, dpaudit.__version__):
        return "one of them has changed"
    return (
        f"one of them has changed, or version {writer} of dpaudit, which the run names, computed it otherwise"
    )


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Add the name of the result to errors; a value of another type is damage."""
    path = folder / "result.json"
    try:
        yield
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"{str(error).removesuffix('.')}, in {path}.") from error
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"Expected the result of a run in {path}, but it is damaged; delete it and run the same command "
            "again to recreate it."
        ) from error


def _require_countable(scores: StoredScores, folder: Path) -> None:
    try:
        if not scores.are_guessed:
            _ = scores.observations
    except InputError as error:
        raise InputError(f"The observations in {folder} are damaged. {error}") from error


def _shown(value: object) -> str:
    if isinstance(value, list) and all(isinstance(one, Mapping) and "name" in one for one in value):
        value = [one["name"] for one in value]
    return "nothing" if value is None else f"{value!s:.200}"


def _differences(values: Mapping[str, Any], scores: StoredScores) -> Iterator[Difference]:
    """Yield what differs from the analysis that the config implies."""
    found = analyze(scores)
    derived = {
        "claim": found.claim,
        "bound": _bound_values(values, found.bound),
        "delta": scores.values["delta"],
        "confidence": found.confidence,
        "shapes": found.shapes,
        "methods": found.methods,
        "one_run_bound": None,
        "mode": scores.audit["mode"],
        **({"canary": scores.audit["canary"]} if "canary" in values else {}),
        **found.more,
        **_size_values(values, scores),
    }
    yield from _unequal("", values, derived)
    yield from _unequal("", values, _verdict_values(values, found))
    if found.is_reversed and REVERSED not in values["notes"]:
        yield Difference("notes", values["notes"], [REVERSED])


def _bound_values(values: Mapping[str, Any], bound: Bound) -> dict[str, Any]:
    """Return the bound; it has one more assumption if failed training runs were repeated."""
    derived, stored = bound.to_dict(), values["bound"]["assumptions"]
    if stored and str(stored[-1]).startswith(RETRIED) and values["mode"] == "many-runs":
        derived["assumptions"] = [*derived["assumptions"], stored[-1]]
    return derived


def _size_values(values: Mapping[str, Any], scores: StoredScores) -> dict[str, Any]:
    """Return the numbers of canaries, steps and models that the scores show."""
    if values["mode"] == "many-runs":
        return {"num_models": sum(len(array) for array in scores.arrays.values())}
    if scores.are_guessed or values["mode"] == "end-to-end":
        size = scores.arrays["present"].size
        return {"num_canaries": size, "num_done": values["num_steps"], "stopped_early": False}
    recorded, width = scores.arrays["scores"].shape
    planned, done = scores.audit.get("first_steps") or values["num_steps"], values["num_steps"]
    stopped = values["stopped_early"] is True and scores.audit["stop_on_violation"] is True
    if recorded > planned or (recorded < planned and not stopped):
        raise InputError(f"Expected the scores of {planned!s:.40} steps, got those of {recorded}.")
    if stopped:  # unless all scores were recorded before
        done = recorded if recorded < planned else values["num_done"]
    width = 1 if values["mode"] == "paper" else width
    return {"num_canaries": width, "num_done": done, "stopped_early": stopped}


def _verdict_values(values: Mapping[str, Any], found: RunAnalysis) -> dict[str, Any]:
    """Return the verdict that follows from bound and tests, and everything that depends on it."""
    verdict, result = found.verdict, found.result
    if result is None:
        name, sentence = (None, None) if verdict is None else (verdict.name, verdict.value)
        return {"verdict": name, "sentence": sentence, **dict.fromkeys(("refuted", "estimate", "diagnosis"))}
    tests: dict[str, Any] | None = None
    if found.tests is not None and values["diagnosis"] is not None:
        diagnosis = _diagnosis(values["diagnosis"], found.tests)
        result = result.joined(diagnosis)
        keys = "name", "p_value", "adjusted"
        rows = [{key: getattr(one, key) for key in keys} for one in diagnosis.findings]
        tests = {"confidence": found.tests, "findings": rows}
    elif found.tests is not None and not any(str(one).startswith(_UNTESTED) for one in values["not_covered"]):
        raise InputError("Expected the tests of the noise, got no diagnosis.")
    return {
        "verdict": result.verdict.name,
        "refuted": list(result.refuted),
        "sentence": result.sentence,
        "diagnosis": tests,
        "estimate": None if values.get("stopped_early") is True else result.estimate.to_dict(),
    }


def _diagnosis(stored: Mapping[str, Any], confidence: float) -> Diagnosis:
    """Return the findings that follow from the p-values, and those that need no test."""
    checks = [Check(sentence="", **_test_values(one)) for one in stored["tests"]]
    names = {check.name for check in checks}
    certain = [
        Finding(adjusted=0.0, sentence="", **_test_values(one))
        for one in stored["findings"]
        if one["name"] not in names
    ]
    return Diagnosis.of(checks, confidence=confidence, certain=certain)


def _test_values(one: Mapping[str, Any]) -> dict[str, Any]:
    estimate = one.get("estimate")
    known = {"name": str(one["name"]), "p_value": float(one["p_value"])}
    return {**known, "estimate": math.nan if estimate is None else float(estimate)}


def _unequal(where: str, stored: object, derived: object) -> Iterator[Difference]:
    """Yield the innermost values that differ; keys that are not derived are not compared."""
    if isinstance(derived, Mapping) and isinstance(stored, Mapping):
        for key, value in derived.items():
            yield from _unequal(f"{where}.{key}".lstrip("."), stored.get(key), value)
    elif isinstance(derived, list) and isinstance(stored, list) and len(derived) == len(stored):
        for index, (one, value) in enumerate(zip(stored, derived, strict=True)):
            name = value.get("name", index) if isinstance(value, Mapping) else index
            yield from _unequal(f"{where}.{name}", one, value)
    elif not _is_close(stored, derived):
        yield Difference(where, stored, derived)


def _is_close(stored: object, derived: object) -> bool:
    if isinstance(stored, str) and isinstance(derived, str):
        return stored == derived or _is_same_sentence(stored, derived)
    is_number = isinstance(stored, int | float) and isinstance(derived, int | float)
    if not is_number or isinstance(stored, bool) or isinstance(derived, bool):
        return stored == derived
    return math.isclose(float(stored), float(derived), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)  # type: ignore[arg-type]


def _is_same_sentence(stored: str, derived: str) -> bool:
    """Return whether sentences differ only in how numbers are rounded."""
    if _NUMBER.sub("#", stored) != _NUMBER.sub("#", derived):
        return False
    pairs = zip(_NUMBER.findall(stored), _NUMBER.findall(derived), strict=True)
    numbers = [[float(one.replace(",", "")) for one in pair] for pair in pairs]
    return all(math.isclose(one, other, rel_tol=_ROUNDED) for one, other in numbers)


def _require_config(values: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise if the result is not that of the training run that the config describes."""
    config, resolved = stored.get("config", {}), stored.get("resolved", {})
    training, audit = config.get("training", {}), config.get("audit", {})
    provenance = values.get("provenance") or {}
    expected = {
        "noise_multiplier": resolved.get("noise_multiplier"),
        "sample_rate": resolved.get("sample_rate"),
        "num_steps": training.get("num_steps"),
        "delta": training.get("delta"),
        "mode": audit.get("mode"),
        "threat_model": config.get("threat_model"),
        "canary": audit.get("canary") if "canary" in values else None,
        "audit": audit if "audit" in values else None,
        **({"provenance": _provenance_values(config, resolved)} if stored and provenance else {}),
    }
    for one in _unequal("", values, {key: value for key, value in expected.items() if value is not None}):
        raise InputError(
            f"Expected {one.key} = {one.derived!s:.60} in {folder / 'result.json'}, as in config.json, got "
            f"{one.stored!s:.60}: one of the files has changed."
        )
    least = audit.get("confidence")
    if least is not None and values["confidence"] < least - _RELATIVE:
        raise InputError(
            f"Expected a confidence of at least {least:g} in {folder / 'result.json'}, as in config.json, "
            f"got {values['confidence']:g}: one of the files has changed."
        )


def _provenance_values(config: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    seeds = {"run": resolved["seed"], **resolved["seeds"]}
    return {
        "data": resolved["data_digest"],
        "configuration": digest({key: value for key, value in config.items() if key != "seed"}),
        "seeds": {name: seed_digest(name, seed) for name, seed in seeds.items()},
    }


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the stored config; empty if it was removed, because it holds the seeds."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def claimed_version(folder: Path, values: Mapping[str, Any]) -> str | None:
    """Return the version of dpaudit that the run names, if it names one."""
    try:
        return f"{values['provenance']['packages']['dpaudit']!s:.40}"
    except (KeyError, TypeError):
        path = folder / "versions.json"
        found = read_json(path).get("dpaudit") if path.exists() else None
        return None if found is None else f"{found!s:.40}"


def _remarks(differences: list[Difference], writer: str) -> tuple[str, ...]:
    """Return a sentence on numbers that this version derives differently."""
    if not differences:
        return ()
    shown = [one for one in differences if one.key == "verdict"] + differences
    first, count = shown[0], len(differences) - 1
    more = f", and {count} more {'number' if count == 1 else 'numbers'} differ" if count else ""
    return (
        f"Its bounds were computed by {writer} of dpaudit; this version derives {first.key} = "
        f"{first.derived!s:.80} instead of {first.stored!s:.80}{more}.",
    )


def _version_1_differences(values: Mapping[str, Any], scores: StoredScores) -> Iterator[Difference]:
    """Yield what differs from bounds by the methods that the result names, and a verdict without reason."""
    bound = Bound.from_dict(values["bound"])
    if scores.claim is not None and isinstance(bound.tradeoff, TradeOff):
        hypothesis = scores.claim.hypothesis(bound.tradeoff)
        claimed = {"epsilon": plain(scores.claim.epsilon), "parameter": plain(hypothesis.parameter)}
        yield from _unequal("claim", values["claim"], {**claimed, "delta": values["delta"]})
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
        for one in _unequal("one_run_bound", row, looser):
            yield Difference(one.key, one.stored, one.derived, is_known=True)  # it guessed otherwise
    yield from _version_1_verdict(values, verdict, is_known=any(one.is_known for one in differences))


def _bound_differences(
    where: str, values: Mapping[str, Any], stored: Mapping[str, Any], derived: dict[str, Any]
) -> Iterator[Difference]:
    """Yield what differs; bets and the joint test have changed since, but not what they count."""
    bound = Bound.from_dict(stored)
    itself = {
        "statement": bound.statement,
        "symbol": bound.tradeoff.symbol,
        "confidence": values["confidence"],
    }
    has_changed = isinstance(bound.inference, Betting | JointExact)
    for one in _unequal(where, stored, derived):
        is_known = has_changed and one.key.endswith((".parameter", "epsilon"))
        yield Difference(one.key, one.stored, one.derived, is_known=is_known)
    yield from _unequal(where, stored, itself)


def _version_1_verdict(
    values: Mapping[str, Any], derived: str | None, *, is_known: bool
) -> Iterator[Difference]:
    """Yield the verdict if it is not that of the bound and the tests, and findings without p-values."""
    tests, has_findings = values.get("diagnosis"), False
    if tests is not None:
        known = {str(one["name"]) for one in tests["tests"]}  # other findings need no test
        expected = {one.name for one in _diagnosis(tests, float(tests["confidence"])).findings} & known
        found = {str(one["name"]) for one in tests["findings"]} & known
        if expected != found:
            yield Difference("findings", sorted(found), sorted(expected))
        # in version 0.1, no verdict rested on tests
        has_findings = values.get("refuted") is not None and bool(tests["findings"])
    stored = values.get("verdict")
    if stored is not None:
        bound, claimed = Bound.from_dict(values["bound"]), values["claim"]["parameter"]
        is_refuted = has_findings or bound.parameter > (math.inf if claimed == "inf" else claimed)
        if is_refuted is not (stored == Verdict.VIOLATION.name):
            other = Verdict.VIOLATION if is_refuted else Verdict.NO_VIOLATION
            yield Difference("verdict", stored, other.name)
    derived = Verdict.VIOLATION.name if has_findings else derived
    # failed trials are errors that the scores do not show
    may_have_failed = bool(values.get("num_failed")) and stored == Verdict.UNDERPOWERED.name
    is_weaker = may_have_failed and derived == Verdict.NO_VIOLATION.name
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
        return _numbers(found) | {"verdict": guessed_verdict(found, guesses, curve, claimed).name}
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
        return _numbers(result.bound) | {"verdict": result.verdict.name}
    found = lower_bound(scores.observations, delta=bound.delta, **method)
    composed = None
    if claim is not None and bound.delta == scores.values["delta"]:
        composed = plain(claim.hypothesis(bound.tradeoff).epsilon(found.parameter))
    return _numbers(found) | {"training_epsilon": composed}


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
